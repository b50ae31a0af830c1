"""BufferLevel: adapters in buffers of their own on the engine's device, and rank-1 dummies."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.errors import StateError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.host import Stream
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, ZeroMemory, tensor_from_storage
from trt_lora.runtime.store.entry import Entry, Loaded


class BufferLevel:
    """An engine for one adapter at a time: a step binds pointers, and ranks are dynamic."""

    def __init__(self, executor: Executor) -> None:
        """Make the zero buffer that all dummies alias.

        Raises:
            BackendError: the device is out of memory.
        """
        self._memory, self._release_inputs = executor.memory, executor.release_inputs
        self._manifest = executor.manifest
        zero, sites = Tensor(0, (1,), executor.manifest.dtype), executor.manifest.lora_bindings
        empty = {
            name: Tensor(0, site.shape(factor, MIN_RANK), site.dtype)
            for name, (site, factor) in sites.items()
        }
        zeros = self._memory.zeros(max(tensor.nbytes for tensor in (zero, *empty.values())))
        self.zero = replace(
            zero, pointer=zeros.pointer, device=zeros.device, owner=ZeroMemory(zeros)
        )
        self.dummies = TensorMap(
            (name, replace(self.zero, shape=t.shape, dtype=t.dtype)) for name, t in empty.items()
        )
        if executor.manifest.lora_vectors:
            self.dummies |= self._ones(executor.manifest)

    def _ones(self, manifest: Manifest) -> TensorMap:
        """The dummies of scales, which share one buffer for each dtype."""
        most, dtypes = max(site.n for site in manifest.sites), {s.dtype for s in manifest.sites}
        storages = {dtype: np.ones(most, storage_dtype(dtype)) for dtype in dtypes}
        ones = self._memory.upload({d: tensor_from_storage(s, d) for d, s in storages.items()})
        scales = {n: site for n, (site, kind) in manifest.lora_bindings.items() if kind == "scale"}
        return TensorMap((n, replace(ones[s.dtype], shape=(s.n,))) for n, s in scales.items())

    def load(self, fitted: Fitted, stream: Stream) -> Loaded:
        """Return an adapter in the engine's memory, in one buffer; on the host it stays in place.

        Raises:
            TensorError: a tensor is on another device.
            BackendError: the device is out of memory.
        """
        tensors = self._memory.upload(fitted.tensors, stream)
        return Loaded(replace(fitted, tensors=tensors), TensorMap(self.dummies | tensors))

    def rewrite(self, loaded: Loaded, slot: int | None) -> None:
        """Copy every B of an adapter to where the engine reads it; on the host it is there."""
        del slot
        if self._memory.device != HOST:
            b = loaded.b_on_host(self._manifest)
            names, tensors = self._manifest.binding_names, loaded.fitted.tensors
            targets = {path: tensors[names.binding("B", path)] for path in b}
            self._memory.write(
                {t.pointer: tensor_from_storage(b[path], t.dtype) for path, t in targets.items()}
            )

    def leave(self, entry: Entry) -> None:
        """Let the engine go of its last inputs, or the memory would wait for its next run."""
        del entry
        self._release_inputs()

    clear = leave

    def rows(self, entries: Sequence[Entry | None], *, all_slots: bool) -> TensorMap:
        """Return the LoRA inputs of rows that all have one adapter; None is the base model.

        Raises:
            StateError: they have several; see `AdapterStore.groups`.
        """
        del all_slots
        first, *others = dict.fromkeys(entries) or [None]
        if others:
            raise StateError(
                f"{len(others) + 1} adapters in one run, and this engine takes one at a time; run "
                "each of `AdapterStore.groups` by itself, or build with --max-loras"
            )
        if first is None:
            return self.dummies
        assert first.loaded is not None  # it is held
        assert first.loaded.bindings is not None
        return first.loaded.bindings
