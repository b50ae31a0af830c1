"""TensorRT-Edge-LLM's `LoRAManager`: named adapters, at most one active, over an `AdapterStore`."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import (
    AdapterError,
    StateError,
    TensorError,
    UnknownAdapterError,
    UnknownBindingError,
)
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_value
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import Weight, weight_of
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.interfaces.edgellm.early_adapters import EarlyAdapter, EarlyAdapters
from trt_lora.runtime.memory.host import Stream
from trt_lora.runtime.memory.interop import tensor_from
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.names import checked_scale, strength_name
from trt_lora.runtime.store.store import AdapterStore


class _Active(NamedTuple):
    """An adapter at a strength, or the base model."""

    name: str = ""
    scale: float = 1.0
    tensors: Mapping[str, Tensor] = MappingProxyType({})  # its own
    bound: TensorMap | None = None  # every LoRA input of the engine
    lease: Lease | None = None  # None before an engine is bound


_BASE = _Active()


class LoRAManager:
    """Named adapters, at most one of them active; a switch changes pointers and copies nothing.

    Load adapters with `load_weights` or `add_weights`, activate one with `switch_weights`, then
    write it into a tensor map with `refresh_tensor_map`. A load that fails leaves the manager as it
    was; what is suspicious about one that succeeds is in its coverage, and goes to the log
    `trt_lora`. The adapters are in `store`, which may be an engine's own: what is loaded there has
    a name here, and the other way round. The manager alone knows which of them is active, and has a
    lease of it, so it cannot be copied; hand it over instead.

    Threads: every method may be called from any thread. A load reads, casts and copies without
    holding up others, and then takes effect at once: others see the manager before or after it,
    never in between. `refresh_tensor_map` waits for nothing. Which adapter is active is the
    manager's and not a thread's: threads that answer with other adapters at the same time have a
    manager each, or take turns from `switch_weights` to `refresh_tensor_map`.

    Memory: a tensor lives as long as it is held: by the store, which lets go of it in `unload` and
    in a load with `replace`; by the manager as long as it is active; by every tensor map it was
    written into, until the map is refreshed or dropped; and by a run under way.
    """

    _active = _BASE  # also where `__init__` has refused

    @checked
    def __init__(self, store: AdapterStore | None = None) -> None:
        """Take the adapters of an engine; without them, `initialize_engine_bindings` makes some."""
        self.store = store
        self._early = EarlyAdapters()  # before an engine is bound
        self._lock = RLock()  # of a change of what is active

    def __repr__(self) -> str:
        """Return how many adapters it has, and which of them is active."""
        active = short_value(self.get_active_adapter_name() or None)
        return f"<LoRAManager of {len(self.get_adapter_names())} adapters, active: {active}>"

    def __del__(self) -> None:
        """Give the lease of the active adapter back to a store that lives on."""
        self._release(self._active)

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
                Until it is there, both are in memory.

        Returns:
            What became of every tensor and every binding; None before an engine is bound: ask
            `get_coverage` then.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or the engine
                (if one is bound) cannot take it. What had the name before keeps it.
        """
        if self.store is None:
            self._early.check_new(name, replace=replace)
            early = EarlyAdapter(load_adapter(path).in_memory(), strict)
            return self._add(name, early, replace=replace)
        coverage = self.store.load(name, path, strict=strict, replace=replace, stream=stream)
        self._follow(name)
        return coverage

    @checked
    def add_weights(
        self, name: str, weights: Mapping[str, object], *, replace: bool = False
    ) -> Coverage | None:
        """Register weights that are in memory already; nothing is copied on their own device.

        Args:
            name: what the caller will call the adapter.
            weights: binding name -> numpy array, `Tensor`, or an object with `__dlpack__` or
                `__cuda_array_interface__`; A [k, r], B [r, n], the scale folded into B. They may
                not be written to afterwards.
            replace: as `load_weights`.

        Returns:
            As `load_weights`.

        Raises:
            AdapterError: the name is taken or is no name, there are no weights, or the engine (if
                one is bound) cannot take them.
            TensorError: an object is no tensor, or its dtype or layout is not supported.
        """
        if not weights:
            raise AdapterError(f"adapter {name!r} has no weights")
        taken = {binding: _weight(binding, given) for binding, given in weights.items()}
        early = EarlyAdapter(Adapter(name, taken, owned=False), strict=True)
        return self._add(name, early, replace=replace)

    @checked
    def blend(
        self, name: str, parts: Mapping[str, float], *, replace: bool = False
    ) -> Coverage | None:
        """Register a weighted sum of adapters; see `AdapterStore.blend`. It is made at once.

        Args:
            name: what the caller will call the sum.
            parts: adapter -> weight, such as `{"a": 0.7, "b": 0.3}`.
            replace: as `load_weights`.

        Returns:
            As `load_weights`.

        Raises:
            UnknownAdapterError, AdapterError: as `AdapterStore.blend`.
        """
        if self.store is not None:
            coverage = self.store.blend(name, parts, replace=replace, at_once=True)
            self._follow(name)
            return coverage
        self._early.check_new(name, replace=replace)
        return self._add(name, self._early.blended(name, parts), replace=replace)

    @checked
    def unload(self, name: str, *, force: bool = False) -> None:
        """Forget an adapter and let go of its memory; its name is free afterwards.

        The memory returns at once, unless a tensor map still holds it (see the class). Blends of
        the adapter are gone with it.

        Args:
            name: of a loaded adapter.
            force: unload it even if it is active; the base model is active afterwards.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: it is active, and `force` is not given.
        """
        with self._lock:
            is_active = self.get_active_adapter_name() == name != ""
            if is_active and not force:
                raise StateError(
                    f"adapter {name!r} is active; switch to another or call reset_weights first, "
                    "or pass force=True, which leaves the base model active"
                )
            if self.store is None:
                self._early[name]  # refuses an unknown one
                del self._early[name]
            else:
                self.store.unload(name)
            if is_active:
                self._activate(_BASE)

    @checked
    def get_coverage(self, name: str) -> Coverage | None:
        """Return what became of an adapter in the engine; None before an engine is bound.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        if self.store is not None:
            return self.store.get_coverage(name)
        self._early[name]
        return None

    @checked
    def switch_weights(self, name: str, scale: float = 1.0) -> None:
        """Activate an adapter; O(1) and without device work at a strength of 1.

        Another strength is an adapter of its own, made from the weights as loaded: every B is
        multiplied and rounded once, in some tens of milliseconds for 100 MB. The store keeps a few
        that are not in use for a switch back; see `AdapterStore`.

        Args:
            name: of a loaded adapter.
            scale: strength; the adapter's delta is multiplied by it.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: the scale is no finite number, or a weight times it leaves the engine's
                dtype. In both cases the active adapter stays active.
        """
        # A label takes as long as the switch.
        scale = 1.0 if scale == 1 else checked_scale(scale, f"adapter {shown(name)}")
        with self._lock:
            if self.store is None:
                self._activate(_Active(name, scale, self._early.tensors(name, scale)))
                return
            before = self._active
            lease = self.store.exchange(before.lease, strength_name(name, scale))
            try:
                self._active = _active_of(self.store, name, scale, lease)
            except BaseException:  # the one before stays active
                self._active = _BASE
                if before is not _BASE:
                    self._active = _active_of(self.store, before.name, before.scale)
                raise

    def reset_weights(self) -> None:
        """Deactivate any adapter: the base model answers, through dummies."""
        with self._lock:
            self._activate(_BASE)

    @checked
    def get_active_weight(self, binding: str) -> Tensor:
        """Return the active adapter's tensor for a binding; a zero of shape [1] if none is active.

        Raises:
            UnknownBindingError: the active adapter has no weight under that name.
        """
        active = self._active
        if active is _BASE:
            return self.store.zero if self.store else tensor_from_numpy(np.zeros(1, np.float32))
        if binding not in active.tensors:
            raise UnknownBindingError(
                f"binding {binding!r} is not in the active adapter {active.name!r}, "
                f"which has {len(active.tensors)} bindings; ask has_weight_for first"
            )
        return active.tensors[binding]

    def get_active_adapter_name(self) -> str:
        """Return the name of the active adapter, or an empty string."""
        return self._active.name

    @property
    def active_scale(self) -> float:
        """The strength of the active adapter; 1.0 if none is active."""
        return self._active.scale

    def get_binding_names(self) -> list[str]:
        """Return the binding names of all loaded adapters, each once, in the order of loading."""
        early, names = self._early, list[str]()
        for adapter in self.get_adapter_names():
            with suppress(UnknownAdapterError):  # another thread has unloaded it
                if coverage := self.get_coverage(adapter):
                    names += [name for name, tensors in coverage.bindings.items() if tensors]
                else:
                    names += early[adapter].adapter.weights
        return list(dict.fromkeys(names))

    def get_adapter_names(self) -> list[str]:
        """Return the names of the loaded adapters, in the order of loading."""
        return list(self._early if self.store is None else self.store.names)

    def has_active_adapter(self) -> bool:
        """Return whether an adapter is active."""
        return self._active is not _BASE

    @checked
    def has_weight_for(self, binding: str) -> bool:
        """Return whether the active adapter has a weight under that name; False if none is."""
        return binding in self._active.tensors

    @checked
    def initialize_engine_bindings(self, executor: Executor) -> None:
        """Make a store of the engine, with its rank-1 dummies; call it once.

        A dummy has A's shape [k, 1] or B's shape [1, n]; all lie in one zero buffer. On an engine
        for many adapters the active one lies in a slot that all rows take. Adapters loaded before
        are fitted now.

        Raises:
            StateError: an engine is bound already.
            AdapterError: an adapter loaded before does not fit; then no engine is bound.
        """
        with self._lock:
            if self.store is not None:
                raise StateError(
                    "this manager has an engine already; make a LoRAManager per engine"
                )
            store = AdapterStore(executor)
            for name, early in self._early.items():
                store.add(name, early.adapter, strict=early.strict)
            if self._active is not _BASE:
                self._active = _active_of(store, self._active.name, self._active.scale)
            self.store, self._early = store, EarlyAdapters()

    @checked
    def refresh_tensor_map(self, tensor_map: TensorMap) -> None:
        """Write the active adapter's tensor, or the dummy, for every LoRA binding of the engine.

        Pointers only: no memory is copied or allocated. Call it after every `switch_weights` and
        `reset_weights`.

        Raises:
            StateError: no engine is bound; call `initialize_engine_bindings` first.
        """
        if self.store is None:
            raise StateError("no engine is bound; call initialize_engine_bindings(executor) first")
        tensor_map.update(self._active.bound or self.store.bindings.rows([None]))

    def __copy__(self, memo: object = None) -> NoReturn:
        """Refuse to be copied or pickled: two managers would have one lease."""
        raise TypeError("a LoRAManager cannot be copied; pass the object itself")

    __deepcopy__ = __reduce__ = __copy__

    def _add(self, name: str, early: EarlyAdapter, *, replace: bool) -> Coverage | None:
        """Register an adapter in memory, where an engine is bound by now."""
        with self._lock:
            store, coverage = self.store, None
            if store is None:
                self._early.check_new(name, replace=replace)
                self._early[name] = early
        if store is not None:
            coverage = store.add(name, early.adapter, strict=early.strict, replace=replace)
        self._follow(name)
        return coverage

    def _follow(self, name: str) -> None:
        """Take what a name means now, if it is active."""
        with self._lock:
            if self.get_active_adapter_name() == name:
                self.switch_weights(name, self.active_scale)

    def _activate(self, active: _Active) -> None:
        before, self._active = self._active, active
        self._release(before)

    def _release(self, active: _Active) -> None:
        if active.lease is not None and self.store is not None:
            self.store.release(active.lease)


def _active_of(store: AdapterStore, name: str, scale: float, lease: Lease | None = None) -> _Active:
    """A leased adapter where a run can bind it; the lease is given back if it cannot."""
    lease = lease or store.lease(strength_name(name, scale))
    loaded = lease.loaded
    try:
        bound = loaded.bindings or store.bindings.rows([lease])
    except BaseException:
        store.release(lease)
        raise
    return _Active(name, scale, loaded.fitted.tensors, bound, lease)


def _weight(binding: object, given: object) -> Weight:
    if not isinstance(binding, str):
        raise AdapterError(
            f"the name of a binding is a string, got {shown(binding)} ({type(binding).__name__})"
        )
    try:
        tensor = tensor_from(given)
    except TensorError as error:
        raise TensorError(f"{binding}: {error}") from error
    return weight_of(binding, tensor)
