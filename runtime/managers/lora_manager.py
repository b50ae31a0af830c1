"""LoRAManager: load, switch, blend and unload adapters of one engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError, StateError, TensorError, UnknownBindingError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_value
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import blend_adapters
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.adapter_registry import AdapterRegistry
from trt_lora.runtime.managers.arguments import check_string, checked_scale
from trt_lora.runtime.memory.host import Stream
from trt_lora.runtime.memory.interop import tensor_from
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy


class LoRAManager:
    """Named adapters, at most one of them active; a switch changes pointers and copies nothing.

    Load adapters with `load_weights` or `add_weights`, activate one with `switch_weights`, then
    write it into a tensor map with `refresh_tensor_map`. A load that fails leaves the manager as it
    was; what is suspicious about one that succeeds is in its coverage, and goes to the log
    `trt_lora`. The manager owns device memory, so it cannot be copied; hand it over instead.

    Threads: every method may be called from any thread. A load reads, casts and copies without
    holding anybody up, and then takes effect at once: others see the manager before or after it,
    never in between. `refresh_tensor_map` waits for nobody. Which adapter is active is the
    manager's and not a thread's: threads that answer with other adapters at the same time have a
    manager each, or take turns from `switch_weights` to `refresh_tensor_map`.

    Memory: a tensor lives as long as anybody holds it. Beside the manager, which lets go of it in
    `unload` and in a load with `replace`, that is every tensor map it was written into, until the
    map is refreshed or dropped, and a run under way.
    """

    def __init__(self) -> None:
        self._registry = AdapterRegistry()
        self._dummy = tensor_from_numpy(np.zeros(1, np.float32))  # before an engine is bound

    def __repr__(self) -> str:
        """Return how many adapters it has, and which of them is active."""
        active = short_value(self.get_active_adapter_name() or None)
        return f"<LoRAManager of {len(self.get_adapter_names())} adapters, active: {active}>"

    @checked
    def load_weights(
        self,
        name: str,
        path: str | Path,
        stream: Stream = None,
        *,
        strict: bool = True,
        replace: bool = False,
    ) -> Coverage | None:
        """Load an adapter from disk and register it.

        Args:
            name: what the caller will call it.
            path: what `load_adapter` reads.
            stream: CUDA stream of the copy to the device.
            strict: False leaves tensors without a binding out and lists them, instead of refusing
                the adapter.
            replace: take the place of an adapter of that name, if there is one. If it is active,
                the new one is active at the same strength, from the next `refresh_tensor_map` on.
                Until it is there, both are in memory; blends of the old one stay as they are.

        Returns:
            What became of every tensor and every binding; None before an engine is bound: ask
            `get_coverage` then.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or the engine
                (if one is bound) cannot take it. What had the name before keeps it.
        """
        self._registry.check_name(name, replace=replace)
        engine = self._registry.state.engine
        adapter = load_adapter(path, engine.manifest if engine else None)
        return self._registry.add(name, adapter, stream, strict=strict, replace=replace)

    @checked
    def add_weights(
        self, name: str, weights: Mapping[str, object], *, replace: bool = False
    ) -> Coverage | None:
        """Register weights that are in memory already; nothing is copied on their own device.

        Args:
            name: what the caller will call the adapter.
            weights: binding name -> numpy array, `Tensor`, or an object with `__dlpack__` or
                `__cuda_array_interface__`; A [k, r], B [r, n], the scale folded into B. Nobody may
                write to them afterwards.
            replace: as `load_weights`.

        Returns:
            As `load_weights`.

        Raises:
            AdapterError: the name is taken or is no name, there are no weights, or the engine (if
                one is bound) cannot take them.
            TensorError: an object is no tensor, or its dtype or layout is not supported.
        """
        self._registry.check_name(name, replace=replace)
        if not weights:
            raise AdapterError(f"adapter {name!r} has no weights")
        taken = {
            binding: weight_of(binding, _as_tensor(binding, w)) for binding, w in weights.items()
        }
        return self._registry.add(name, Adapter(name, taken, owned=False), replace=replace)

    @checked
    def blend(
        self, name: str, parts: Mapping[str, float], *, replace: bool = False
    ) -> Coverage | None:
        """Register a weighted sum of loaded adapters as an adapter of its own.

        Exact but for one rounding of each scaled B to the engine's dtype: the ranks of a site add
        up. The sum has memory of its own: its parts may be used, replaced and unloaded.

        Args:
            name: what the caller will call the sum.
            parts: adapter -> weight, such as `{"a": 0.7, "b": 0.3}`.
            replace: as `load_weights`.

        Returns:
            As `load_weights`.

        Raises:
            UnknownAdapterError: a part is not loaded.
            AdapterError: the name is taken or is no name, a weight is no finite number, there are
                no parts, or a site's ranks add up to more than the engine's maximum.
        """
        state = self._registry.state
        self._registry.check_name(name, replace=replace)
        if not parts:
            raise AdapterError(f"blend {name!r} has no parts; name at least one adapter")
        loaded = {part: state.get(part) for part in parts}
        scales = {
            part: checked_scale(weight, f"{name}: adapter {part!r}")
            for part, weight in parts.items()
        }
        blended = blend_adapters(name, [(loaded[part].adapter, scales[part]) for part in parts])
        strict = all(part.strict for part in loaded.values())
        return self._registry.add(name, blended, strict=strict, replace=replace)

    @checked
    def unload(self, name: str, *, force: bool = False) -> None:
        """Forget an adapter and let go of its memory; its name is free afterwards.

        The memory returns at once, unless a tensor map still holds it (see the class).
        Blends of the adapter stay as they are.

        Args:
            name: of a loaded adapter.
            force: unload it even if it is active; the base model is active afterwards.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: it is active, and `force` is not given.
        """
        self._registry.remove(name, force=force)

    @checked
    def get_coverage(self, name: str) -> Coverage | None:
        """Return what became of an adapter in the engine; None before an engine is bound.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        return self._registry.state.get(name).coverage

    @checked
    def switch_weights(self, name: str, scale: float = 1.0) -> None:
        """Activate an adapter; O(1) and without device work at a strength of 1.

        Another strength needs a B of its own: every B is multiplied, rounded once and copied to the
        device, from the weights as loaded, in some tens of milliseconds for 100 MB (the first time
        in a process two to five times as long, for memory that was never touched). The last such
        strength is kept, of one adapter in all: a switch back to it costs nothing, and a switch to
        another takes its place. So strengths cost the memory of one adapter's B's, and of two while
        one takes the place of another.

        Args:
            name: of a loaded adapter.
            scale: strength; the adapter's delta is multiplied by it.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: the scale is no finite number, or a weight times it leaves the engine's
                dtype. In both cases the active adapter stays active.
        """
        self._registry.switch(name, checked_scale(scale, f"adapter {shown(name)}"))

    def reset_weights(self) -> None:
        """Deactivate any adapter: the base model answers, through dummies."""
        self._registry.activate_base()

    @checked
    def get_active_weight(self, binding: str) -> Tensor:
        """Return the active adapter's tensor for a binding; a zero of shape [1] if none is active.

        Raises:
            UnknownBindingError: the active adapter has no weight under that name.
        """
        state = self._registry.state
        if state.active is None:
            return state.engine.dummy if state.engine else self._dummy
        try:
            return state.active.tensors[binding]
        except KeyError:
            raise UnknownBindingError(
                f"binding {binding!r} is not in the active adapter {state.active.name!r}, "
                f"which has {len(state.active.tensors)} bindings; ask has_weight_for first"
            ) from None

    def get_active_adapter_name(self) -> str:
        """Return the name of the active adapter, or an empty string."""
        active = self._registry.state.active
        return active.name if active else ""

    @property
    def active_scale(self) -> float:
        """The strength of the active adapter; 1.0 if none is active."""
        active = self._registry.state.active
        return active.scale if active else 1.0

    def get_binding_names(self) -> list[str]:
        """Return the binding names of all loaded adapters, each once, in the order of loading."""
        names = (
            name for loaded in self._registry.state.adapters.values() for name in loaded.tensors
        )
        return list(dict.fromkeys(names))

    def get_adapter_names(self) -> list[str]:
        """Return the names of the loaded adapters, in the order of loading."""
        return list(self._registry.state.adapters)

    def has_active_adapter(self) -> bool:
        """Return whether an adapter is active."""
        return self._registry.state.active is not None

    @checked
    def has_weight_for(self, binding: str) -> bool:
        """Return whether the active adapter has a weight under that name; False if none is."""
        active = self._registry.state.active
        return active is not None and binding in active.tensors

    @checked
    def initialize_engine_bindings(self, executor: Executor) -> None:
        """Register the engine's LoRA bindings and make their rank-1 dummies; call it once.

        A dummy has A's shape [k, 1] or B's shape [1, n]; all lie in one zero buffer. On an engine
        for many adapters they are a slot of zeros, and the active adapter is a slot for all rows.
        Adapters loaded before are fitted now.

        Raises:
            StateError: an engine is bound already.
            AdapterError: an adapter loaded before does not fit; then no engine is bound.
        """
        self._registry.bind(executor)

    @checked
    def refresh_tensor_map(self, tensor_map: TensorMap) -> None:
        """Write the active adapter's tensor, or the dummy, for every LoRA binding of the engine.

        Pointers only: no memory is copied or allocated. Call it after every `switch_weights` and
        `reset_weights`.

        Raises:
            StateError: no engine is bound; call `initialize_engine_bindings` first.
        """
        state = self._registry.state
        if state.engine is None:
            raise StateError("no engine is bound; call initialize_engine_bindings(executor) first")
        tensor_map.update(state.active.bound if state.active else state.engine.dummies)

    def __copy__(self) -> NoReturn:
        """Refuse: two managers would own one device memory."""
        raise TypeError("a LoRAManager cannot be copied; pass the object itself")

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse, as `__copy__` does."""
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: device memory does not travel."""
        self.__copy__()


def _as_tensor(binding: str, weight: object) -> Tensor:
    check_string(binding, "the name of a binding")
    try:
        return tensor_from(weight)
    except TensorError as error:
        raise TensorError(f"{binding}: {error}") from error
