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
from trt_lora.runtime.blend import blend_adapters, scaled_adapter
from trt_lora.runtime.coverage import Coverage
from trt_lora.runtime.coverage_warnings import log_warnings
from trt_lora.runtime.engine_bindings import EngineBindings, Loaded
from trt_lora.runtime.exchange import tensor_from
from trt_lora.runtime.executor import Executor
from trt_lora.runtime.load import load_adapter
from trt_lora.runtime.memory import Stream
from trt_lora.runtime.tensors import Tensor, TensorMap, tensor_from_numpy
from trt_lora.runtime.weight import weight_of


class LoRAManager:
    """Named adapters, at most one of them active; a switch changes pointers and copies nothing.

    Load adapters with `load_weights` or `add_weights`, activate one with `switch_weights`, then
    write it into a tensor map with `refresh_tensor_map`. A load that fails leaves the manager as it
    was; what is suspicious about one that succeeds is in its coverage, and goes to the log
    `trt_lora`. The manager owns device memory, so it cannot be copied; hand it over instead.
    """

    def __init__(self) -> None:
        self._engine: EngineBindings | None = None
        self._loaded: dict[str, Loaded] = {}
        self._scaled: dict[str, tuple[float, Loaded]] = {}  # the last other strength of an adapter
        self._dummy = tensor_from_numpy(np.zeros(1, np.float32))
        self._active, self._scale = "", 1.0  # "" is the base model
        self._current: Loaded | None = None  # the active adapter at its strength

    def load_weights(
        self, name: str, path: str | Path, stream: Stream = None, *, strict: bool = True
    ) -> Coverage | None:
        """Load an adapter from disk and register it.

        Args:
            name: what the caller will call it.
            path: what `load_adapter` reads.
            stream: CUDA stream of the copy to the device.
            strict: False leaves tensors without a binding out and lists them, instead of refusing
                the adapter.

        Returns:
            What became of every tensor and every binding; None before an engine is bound: ask
            `get_coverage` then.

        Raises:
            AdapterError: the name is taken, the adapter cannot be read, or the engine (if one is
                bound) cannot take it.
        """
        self._check_name_is_free(name)
        adapter = load_adapter(path, self._engine.manifest if self._engine else None)
        return self._register(name, adapter, stream, strict=strict)

    def add_weights(self, name: str, weights: Mapping[str, object]) -> Coverage | None:
        """Register weights that are in memory already; nothing is copied on their own device.

        Args:
            name: what the caller will call the adapter.
            weights: binding name -> numpy array, `Tensor`, or an object with `__dlpack__` or
                `__cuda_array_interface__`; A [k, r], B [r, n], the scale folded into B. Nobody may
                write to them afterwards.

        Returns:
            As `load_weights`.

        Raises:
            AdapterError: the name is taken, there are no weights, or the engine (if one is bound)
                cannot take them.
            TensorError: an object is no tensor, or its dtype or layout is not supported.
        """
        self._check_name_is_free(name)
        if not weights:
            raise AdapterError(f"adapter {name!r} has no weights")
        taken = {binding: weight_of(binding, _taken(binding, w)) for binding, w in weights.items()}
        return self._register(name, Adapter(name, taken, owned=False))

    def blend(self, name: str, parts: Mapping[str, float]) -> Coverage | None:
        """Register a weighted sum of loaded adapters as an adapter of its own.

        Exact but for one rounding of each scaled B to the engine's dtype: the ranks of a site add
        up. The parts may be used as before.

        Args:
            name: what the caller will call the sum.
            parts: adapter -> weight, such as `{"a": 0.7, "b": 0.3}`.

        Returns:
            As `load_weights`.

        Raises:
            UnknownAdapterError: a part is not loaded.
            AdapterError: the name is taken, a weight is not finite, there are no parts, or a
                site's ranks add up to more than the engine's maximum.
        """
        self._check_name_is_free(name)
        if not parts:
            raise AdapterError(f"blend {name!r} has no parts; name at least one adapter")
        adapters = [(self._get(part).adapter, weight) for part, weight in parts.items()]
        strict = all(self._get(part).strict for part in parts)
        return self._register(name, blend_adapters(name, adapters), strict=strict)

    def get_coverage(self, name: str) -> Coverage | None:
        """Return what became of an adapter in the engine; None before an engine is bound.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        return self._get(name).coverage

    def switch_weights(self, name: str, scale: float = 1.0) -> None:
        """Activate an adapter; O(1), no device work.

        Another strength than 1 needs a B of its own: it is made at the first switch to it, from
        the weights as loaded, and kept until the adapter is switched to a third one.

        Args:
            name: of a loaded adapter.
            scale: strength; the adapter's delta is multiplied by it.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: the scale is not finite, or a weight times it leaves the engine's dtype.
                In both cases the active adapter stays active.
        """
        self._current = self._at_strength(name, scale)
        self._active, self._scale = name, scale

    def reset_weights(self) -> None:
        """Deactivate any adapter: the base model answers, through dummies."""
        self._active, self._scale, self._current = "", 1.0, None

    def get_active_weight(self, binding: str) -> Tensor:
        """Return the active adapter's tensor for a binding; a zero of shape [1] if none is active.

        Raises:
            UnknownBindingError: the active adapter has no weight under that name.
        """
        if self._current is None:
            return self._dummy
        try:
            return self._current.tensors[binding]
        except KeyError:
            raise UnknownBindingError(
                f"binding {binding!r} is not in the active adapter {self._active!r}, "
                f"which has {len(self._current.tensors)} bindings; ask has_weight_for first"
            ) from None

    def get_active_adapter_name(self) -> str:
        """Return the name of the active adapter, or an empty string."""
        return self._active

    def get_binding_names(self) -> list[str]:
        """Return the binding names of all loaded adapters, each once, in the order of loading."""
        names = (name for loaded in self._loaded.values() for name in loaded.tensors)
        return list(dict.fromkeys(names))

    def get_adapter_names(self) -> list[str]:
        """Return the names of the loaded adapters, in the order of loading."""
        return list(self._loaded)

    def has_active_adapter(self) -> bool:
        """Return whether an adapter is active."""
        return bool(self._active)

    def has_weight_for(self, binding: str) -> bool:
        """Return whether the active adapter has a weight under that name; False if none is."""
        return self._current is not None and binding in self._current.tensors

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
        pending = self._loaded.items()
        loaded = {name: engine.load(item.adapter, strict=item.strict) for name, item in pending}
        before = self._engine, self._loaded, self._scaled
        self._engine, self._loaded, self._scaled = engine, loaded, {}
        try:
            self._current = self._at_strength(self._active, self._scale) if self._active else None
        except AdapterError:
            self._engine, self._loaded, self._scaled = before
            raise
        self._dummy = engine.dummy
        for item in loaded.values():
            _log(item)

    def refresh_tensor_map(self, tensor_map: TensorMap) -> None:
        """Write the active adapter's tensor, or the dummy, for every LoRA binding of the engine.

        Pointers only: no memory is copied or allocated. Call it after every `switch_weights` and
        `reset_weights`.

        Raises:
            StateError: no engine is bound; call `initialize_engine_bindings` first.
        """
        if self._engine is None:
            raise StateError("no engine is bound; call initialize_engine_bindings(executor) first")
        tensor_map.update(self._current.bound if self._current else self._engine.dummies)

    def _register(
        self, name: str, adapter: Adapter, stream: Stream = None, *, strict: bool = True
    ) -> Coverage | None:
        self._loaded[name] = loaded = self._placed(adapter, stream, strict=strict)
        _log(loaded)
        return loaded.coverage

    def _placed(self, adapter: Adapter, stream: Stream = None, *, strict: bool = True) -> Loaded:
        if self._engine is None:
            return Loaded.pending(adapter, strict=strict)
        return self._engine.load(adapter, strict=strict, stream=stream)

    def _at_strength(self, name: str, scale: float) -> Loaded:
        loaded = self._get(name)
        if scale == 1:
            return loaded
        kept = self._scaled.get(name)
        if kept is None or kept[0] != scale:
            adapter = scaled_adapter(loaded.adapter, scale)
            kept = self._scaled[name] = scale, self._placed(adapter, strict=loaded.strict)
        return kept[1]

    def _get(self, name: str) -> Loaded:
        if name not in self._loaded:
            raise UnknownAdapterError(
                f"unknown adapter {name!r}; loaded: {', '.join(self._loaded) or 'none'}"
            )
        return self._loaded[name]

    def _check_name_is_free(self, name: str) -> None:
        if not name:
            raise AdapterError("an adapter needs a name; the empty one means the base model")
        if name in self._loaded:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; choose another name than "
                f"{', '.join(self._loaded)}"
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


def _log(loaded: Loaded) -> None:
    if loaded.coverage is not None:
        log_warnings(loaded.coverage.source, loaded.coverage.warnings)


def _taken(binding: str, weight: object) -> Tensor:
    try:
        return tensor_from(weight)
    except TensorError as error:
        raise TensorError(f"{binding}: {error}") from error
