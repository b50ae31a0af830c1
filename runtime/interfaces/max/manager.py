"""MAX's `LoRAManager`: load, activate and unload by name, and the inputs of a batch."""

import logging
import os
from collections.abc import Sequence
from typing import Protocol, TypeVar

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.slots import BASE_SLOT
from trt_lora.plugins.errors import (
    AdapterError,
    ConfigError,
    LoRAError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.plugins.messages import shown
from trt_lora.runtime.interfaces.max.config import LoRAConfig
from trt_lora.runtime.interfaces.max.status import LoRAOutcome, LoRAStatus
from trt_lora.runtime.manifest import Binding
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore

_LOG = logging.getLogger(__name__)


class RequestContext(Protocol):
    """A sequence of a batch, which names its adapter."""

    @property
    def model_name(self) -> str:
        """Name of an adapter; empty or the base model's name is the base model."""
        ...


Context = TypeVar("Context", bound=RequestContext)


class LoRAManager:
    """MAX's `LoRAManager` over the adapters of an engine with slots; it holds none itself.

    Base model, dtype and heads are the engine's, so MAX's arguments of these names are refused.
    Any thread may call it, but `process_lora_requests`, which one thread calls.
    """

    @checked
    def __init__(
        self,
        config: LoRAConfig,
        adapters: AdapterStore,
        *,
        zmq_endpoint_base: str | None = None,
        base_model_path: str | None = None,
        base_dtype: object = None,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        """Load the config's adapters, and open the endpoints of requests.

        Args:
            config: see there; `adapters` are made with its `store_config`.
            adapters: of a running engine.
            zmq_endpoint_base: such as "ipc:///run/me/lora"; None takes no requests.
            base_model_path: the engine's, as the next four are; refused.
            base_dtype: refused.
            n_heads: refused.
            n_kv_heads: refused.
            head_dim: refused.

        Raises:
            ConfigError: an option is not what the adapters have, or the engine's to say, or pyzmq
                and msgspec are missing.
            AdapterError: an adapter of `lora_paths` cannot be loaded.
        """
        of_engine = {
            "base_model_path": base_model_path,
            "base_dtype": base_dtype,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
        }
        for option, value in of_engine.items():
            if value is not None:
                raise ConfigError(
                    f"{option} is {shown(value)}: that is the engine's; leave it out, and pass "
                    "engine.adapters"
                )
        config.check(adapters)
        self.adapters, self._manifest = adapters, adapters.manifest
        self._held: dict[str, Lease] = {}  # of the rows of the last step
        for path in config.lora_paths:
            outcome = self.load(*_name_and_path(path))
            if outcome.status is not LoRAStatus.SUCCESS:
                raise AdapterError(f"lora_paths: {outcome.message}")
        self._requests = None
        if zmq_endpoint_base is not None:
            try:
                from trt_lora.runtime.interfaces.max.requests import LoRARequestProcessor
            except ImportError as error:
                missing = "pyzmq" if error.name == "zmq" else error.name
                raise ConfigError(
                    f"requests need {missing}; install it with: pip install 'trt-lora[requests]'"
                ) from error
            self._requests = LoRARequestProcessor(
                self.load, self.unload, zmq_endpoint_base, config.allowed_roots
            )

    @staticmethod
    @checked
    def get_lora_manager(config: LoRAConfig, adapters: AdapterStore | None) -> "LoRAManager | None":
        """Return the manager of an engine's adapters; None where LoRA is off."""
        if adapters is None or not config.enable_lora:
            return None
        return LoRAManager(config, adapters)

    @property
    def loras(self) -> list[str]:
        """The names of the loaded adapters."""
        return list(self.adapters.names)

    @checked
    def is_lora(self, name: str) -> bool:
        """Return whether an adapter of that name is loaded."""
        return name in self.adapters.names

    @checked
    def is_active_lora(self, name: str) -> bool:
        """Return whether that adapter is in a slot of the device."""
        return name in self.adapters.bindings.slots

    @checked
    def load_adapter(self, path: str) -> LoRAStatus:
        """Load the adapter of "name=path", or of a path that is its own name.

        Why it was refused goes to the log; `load` returns it.
        """
        return _logged(self.load(*_name_and_path(path)))

    @checked
    def unload_adapter(self, name: str) -> LoRAStatus:
        """Forget an adapter; sequences that use it go on to their end."""
        return _logged(self.unload(name))

    @checked
    def load(self, name: str, path: str) -> LoRAOutcome:
        """Load the adapter at a path under a name; again from that path is a success too."""
        if name == self._manifest.base_model.name:
            return LoRAOutcome(
                LoRAStatus.LOAD_NAME_EXISTS,
                f"{shown(name)} is the base model's name: rows that name it take no adapter; "
                "choose another name",
            )
        if "\0" in path or not os.path.exists(path):
            return LoRAOutcome(LoRAStatus.LOAD_INVALID_PATH, f"{shown(path)} does not exist")
        try:
            if self.is_lora(name):
                return self._loaded_before(name, path)
            self.adapters.load(name, path)
        except AdapterError as error:
            return LoRAOutcome(LoRAStatus.LOAD_INVALID_ADAPTER, str(error))
        except LoRAError as error:
            return LoRAOutcome(LoRAStatus.LOAD_ERROR, str(error))
        return LoRAOutcome(LoRAStatus.SUCCESS, f"adapter {name!r} is loaded")

    @checked
    def unload(self, name: str) -> LoRAOutcome:
        """Forget an adapter; sequences that use it go on to their end."""
        try:
            self.adapters.unload(name)
        except UnknownAdapterError as error:
            return LoRAOutcome(LoRAStatus.UNLOAD_NAME_NONEXISTENT, str(error))
        except LoRAError as error:
            return LoRAOutcome(LoRAStatus.UNLOAD_ERROR, str(error))
        return LoRAOutcome(LoRAStatus.SUCCESS, f"adapter {name!r} is unloaded")

    @checked
    def activate_adapter(self, name: str) -> None:
        """Copy an adapter to a slot of the device, if it is in none.

        Raises:
            UnknownAdapterError: (a KeyError) no adapter of that name is loaded.
            StateError: sequences use all slots.
        """
        self.adapters.bindings.activate(name)

    @checked
    def sort_lora_batch(self, context_batch: Sequence[Context]) -> list[Context]:
        """Return a batch with the rows of a slot side by side: highest slot first, base last.

        Adapters that are in no slot yet come before the base model. Nothing is activated.

        Raises:
            UnknownAdapterError: a row names an adapter that is not loaded.
        """
        slots = self.adapters.bindings.slots

        def place(context: Context) -> int:
            name = self._adapter_of(context)
            return BASE_SLOT - 1 if name is None else slots.get(name, BASE_SLOT)

        return sorted(context_batch, key=place, reverse=True)

    @checked
    def get_lora_graph_inputs(self, context_batch: Sequence[RequestContext]) -> TensorMap:
        """Return the LoRA inputs of a step of these rows, by name; adapters are activated.

        They stay in their slots until the next call, whatever requests unload meanwhile: call it
        when the step before has ended, for one batch. Rows are sequences, so MAX's
        `input_row_offsets` are not needed; the device is the engine's.

        Raises:
            UnknownAdapterError: a row names an adapter that is not loaded.
            StateError: the rows take more adapters than there are slots.
        """
        names = [self._adapter_of(context) for context in context_batch]
        self._hold({name for name in names if name is not None})
        return self.adapters.bindings.rows([name and self._held[name] for name in names])

    def get_symbolic_inputs(self) -> list[Binding]:
        """Return the engine's LoRA inputs: names, dtypes and shapes with symbolic dimensions."""
        names = self._manifest.lora_inputs
        return [binding for binding in self._manifest.inputs if binding.name in names]

    def process_lora_requests(self) -> None:
        """Take requests in and answer those that are done; waits for neither.

        Raises:
            StateError: the manager has no endpoints.
        """
        if self._requests is None:
            raise StateError("this manager takes no requests; pass zmq_endpoint_base to it")
        self._requests.process_lora_requests()

    def close(self) -> None:
        """Close the endpoints, and let go of the adapters of the last step."""
        if self._requests is not None:
            self._requests.close()
        self._hold(set())

    def _hold(self, names: set[str]) -> None:
        """Have a lease of what these names mean now, and no others."""
        slots = self.adapters.bindings.slot_count or 0
        if len(names) > slots:
            raise StateError(
                f"{len(names)} adapters in one step are more than the {slots} slots; split the "
                "batch, or build with a larger --max-loras"
            )
        for name, lease in list(self._held.items()):
            if name not in names or lease.version != self.adapters.info(name).version:
                self.adapters.release(self._held.pop(name))
        for name in names - self._held.keys():
            self._held[name] = self.adapters.lease(name)

    def _loaded_before(self, name: str, path: str) -> LoRAOutcome:
        source = self.adapters.get_coverage(name).source
        if os.path.realpath(source) == os.path.realpath(path):
            return LoRAOutcome(LoRAStatus.SUCCESS, f"adapter {name!r} is loaded already")
        message = f"adapter {name!r} is loaded from {source} already; unload it first"
        return LoRAOutcome(LoRAStatus.LOAD_NAME_EXISTS, message)

    def _adapter_of(self, context: RequestContext) -> str | None:
        name = context.model_name
        if name in ("", self._manifest.base_model.name):
            return None
        if not self.is_lora(name):
            raise UnknownAdapterError(
                f"a row names the adapter {shown(name)}; loaded: {', '.join(self.loras) or 'none'}"
            )
        return name


def _name_and_path(path: str) -> tuple[str, str]:
    """Name and path of "name=path"; a path without a name is its own."""
    name, separator, rest = path.partition("=")
    return (name, rest) if separator else (path, path)


def _logged(outcome: LoRAOutcome) -> LoRAStatus:
    if outcome.status is not LoRAStatus.SUCCESS:
        _LOG.warning("%s: %s", outcome.status.value, outcome.message)
    return outcome.status
