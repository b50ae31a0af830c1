"""LoRAManager: which adapters are loaded, which one is active, and what an engine is bound to."""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from trt_lora.plugins.errors import (
    AdapterError,
    StateError,
    TensorError,
    UnknownAdapterError,
    UnknownBindingError,
)
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.engine_bindings import EngineBindings
from trt_lora.runtime.exchange import tensor_from
from trt_lora.runtime.executor import Executor
from trt_lora.runtime.load import load_adapter
from trt_lora.runtime.memory import Stream
from trt_lora.runtime.tensors import Tensor, TensorMap, tensor_from_numpy


class LoRAManager:
    """Named adapters, at most one of them active; a switch changes pointers and copies nothing.

    Load adapters with `load_weights` or `add_weights`, activate one with `switch_weights`, then
    write it into a tensor map with `refresh_tensor_map`. A load that fails leaves the manager as it
    was. The manager owns device memory, so it cannot be copied; hand it over instead.
    """

    def __init__(self) -> None:
        self._engine: EngineBindings | None = None
        self._pending: dict[str, Adapter] = {}  # loaded before the engine was known
        self._weights: dict[str, dict[str, Tensor]] = {}  # adapter -> its own bindings
        self._bound: dict[str, dict[str, Tensor]] = {"": {}}  # adapter -> every engine binding
        self._dummy = tensor_from_numpy(np.zeros(1, np.float32))
        self._active = ""  # "" is the base model

    def load_weights(self, name: str, path: str | Path, stream: Stream = None) -> None:
        """Load an adapter from a PEFT directory or a safetensors file and register it.

        Args:
            name: what the caller will call it.
            path: a directory that PEFT wrote, or a `.safetensors` file whose tensor names are
                binding names.
            stream: CUDA stream of the copy to the device.

        Raises:
            AdapterError: the name is taken, the adapter cannot be read, or the engine (if one is
                bound) cannot take it.
        """
        self._check_name_is_free(name)
        self._register(name, load_adapter(path), stream)

    def add_weights(self, name: str, weights: Mapping[str, object]) -> None:
        """Register weights that are in memory already; nothing is copied on their own device.

        Args:
            name: what the caller will call the adapter.
            weights: binding name -> numpy array, `Tensor`, or an object with `__dlpack__` or
                `__cuda_array_interface__`; A [k, r], B [r, n], the scale folded into B. Nobody may
                write to them afterwards.

        Raises:
            AdapterError: the name is taken, there are no weights, or the engine (if one is bound)
                cannot take them.
            TensorError: an object is no tensor, or its dtype or layout is not supported.
        """
        self._check_name_is_free(name)
        if not weights:
            raise AdapterError(f"adapter {name!r} has no weights")
        tensors = {binding: _taken(binding, weight) for binding, weight in weights.items()}
        self._register(name, Adapter(name, tensors, owned=False))

    def switch_weights(self, name: str) -> None:
        """Activate an adapter; O(1), no device work.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded; the active one stays active.
        """
        if name not in self._weights:
            raise UnknownAdapterError(
                f"unknown adapter {name!r}; loaded: {', '.join(self._weights) or 'none'}"
            )
        self._active = name

    def reset_weights(self) -> None:
        """Deactivate any adapter: the base model answers, through dummies."""
        self._active = ""

    def get_active_weight(self, binding: str) -> Tensor:
        """Return the active adapter's tensor for a binding; a zero of shape [1] if none is active.

        Raises:
            UnknownBindingError: the active adapter has no weight under that name.
        """
        if not self._active:
            return self._dummy
        try:
            return self._weights[self._active][binding]
        except KeyError:
            raise UnknownBindingError(
                f"binding {binding!r} is not in the active adapter {self._active!r}, "
                f"which has {len(self._weights[self._active])} bindings; ask has_weight_for first"
            ) from None

    def get_active_adapter_name(self) -> str:
        """Return the name of the active adapter, or an empty string."""
        return self._active

    def get_binding_names(self) -> list[str]:
        """Return the binding names of all loaded adapters, each once, in the order of loading."""
        return list(dict.fromkeys(name for weights in self._weights.values() for name in weights))

    def get_adapter_names(self) -> list[str]:
        """Return the names of the loaded adapters, in the order of loading."""
        return list(self._weights)

    def has_active_adapter(self) -> bool:
        """Return whether an adapter is active."""
        return bool(self._active)

    def has_weight_for(self, binding: str) -> bool:
        """Return whether the active adapter has a weight under that name; False if none is."""
        return bool(self._active) and binding in self._weights[self._active]

    def initialize_engine_bindings(self, executor: Executor) -> None:
        """Register the engine's LoRA bindings and make their rank-1 dummies; call it once.

        A dummy has A's shape [k, 1] or B's shape [1, n]; all lie in one zero buffer. Adapters
        loaded before are fitted now.

        Raises:
            StateError: an engine is bound already.
            AdapterError: an adapter loaded before does not fit; then no engine is bound.
        """
        if self._engine is not None:
            raise StateError("this manager has an engine already; make a LoRAManager per engine")
        engine = EngineBindings.of(executor)
        fitted = {name: engine.fit(adapter) for name, adapter in self._pending.items()}
        self._engine, self._dummy = engine, engine.dummy
        self._weights = fitted
        self._bound = {name: {**engine.dummies, **weights} for name, weights in fitted.items()}
        self._bound[""] = dict(engine.dummies)
        self._pending.clear()

    def refresh_tensor_map(self, tensor_map: TensorMap) -> None:
        """Write the active adapter's tensor, or the dummy, for every LoRA binding of the engine.

        Pointers only: no memory is copied or allocated. Call it after every `switch_weights` and
        `reset_weights`.

        Raises:
            StateError: no engine is bound; call `initialize_engine_bindings` first.
        """
        if self._engine is None:
            raise StateError("no engine is bound; call initialize_engine_bindings(executor) first")
        tensor_map.update(self._bound[self._active])

    def _register(self, name: str, adapter: Adapter, stream: Stream = None) -> None:
        if self._engine is None:
            self._pending[name], self._weights[name] = adapter, dict(adapter.tensors)
        else:
            weights = self._engine.fit(adapter, stream)
            self._bound[name] = {**self._engine.dummies, **weights}
            self._weights[name] = weights

    def _check_name_is_free(self, name: str) -> None:
        if not name:
            raise AdapterError("an adapter needs a name; the empty one means the base model")
        if name in self._weights:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; choose another name than "
                f"{', '.join(self._weights)}"
            )

    def __copy__(self) -> NoReturn:
        """Refuse: two managers would own one device memory."""
        raise TypeError("a LoRAManager cannot be copied; pass the object itself")

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse, as `__copy__` does."""
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: device memory does not travel."""
        self.__copy__()


def _taken(binding: str, weight: object) -> Tensor:
    try:
        return tensor_from(weight)
    except TensorError as error:
        raise TensorError(f"{binding}: {error}") from error
