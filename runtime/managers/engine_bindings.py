"""LoRA inputs of one engine: rank-1 dummies, and adapters fitted to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.loaded_adapter import BoundAdapter
from trt_lora.runtime.managers.slots.one_slot import as_slot, base_rows, rows_of_slot, unpadded
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import Memory, Stream
from trt_lora.runtime.memory.tensor import Tensor, ZeroMemory


@dataclass(frozen=True)
class EngineBindings:
    """An engine as a manager sees it: manifest, memory and dummies."""

    manifest: Manifest
    memory: Memory
    rank_multiple: int  # as in `Executor`
    release_inputs: Callable[[], None]  # as in `Executor`
    dummy: Tensor  # a zero of shape [1] and the engine's dtype
    dummies: Mapping[str, Tensor]  # A [k, 1] or B [1, n] by binding, all in one zero buffer; or
    # with slots a slot of zeros, and no row that takes it

    @classmethod
    def from_executor(cls, executor: Executor) -> "EngineBindings":
        """Read the engine's manifest and make the zero buffer on its device."""
        manifest = executor.manifest
        dummy = Tensor(0, (1,), manifest.dtype)
        rank = manifest.max_lora_rank if manifest.max_loras else MIN_RANK
        shapes = {
            name: replace(dummy, shape=site.shape(factor, rank), dtype=site.dtype)
            for name, (site, factor) in manifest.lora_bindings.items()
        }
        zeros = executor.memory.zeros(max(tensor.nbytes for tensor in (dummy, *shapes.values())))
        owner = ZeroMemory(zeros)

        def on_device(tensor: Tensor) -> Tensor:
            return replace(tensor, pointer=zeros.pointer, device=zeros.device, owner=owner)

        dummies = {name: on_device(tensor) for name, tensor in shapes.items()}
        if manifest.max_loras:
            dummies = as_slot(dummies) | executor.memory.upload(base_rows(manifest))
        return cls(
            manifest,
            executor.memory,
            manifest.max_lora_rank if manifest.max_loras else executor.rank_multiple,
            executor.release_inputs,
            on_device(dummy),
            dummies,
        )

    def load(self, adapter: Adapter, *, strict: bool = True, stream: Stream = None) -> BoundAdapter:
        """Return the adapter on the engine's device.

        Raises:
            AdapterError: the engine cannot take the adapter.
        """
        fitted = fit_adapter(
            adapter, self.manifest, strict=strict, rank_multiple=self.rank_multiple
        )
        is_slot = self.manifest.max_loras > 0
        rows = rows_of_slot(self.manifest, fitted) if is_slot else {}
        tensors = self.memory.upload({**fitted.tensors, **rows}, stream)
        rows = {name: tensors.pop(name) for name in rows}
        weights = {name: weight_of(name, tensor) for name, tensor in tensors.items()}
        if is_slot:
            weights = unpadded(weights, self.manifest, fitted.coverage)
        held = Adapter(adapter.source, weights, adapter.base_model)
        bound = {**self.dummies, **(as_slot(tensors) if is_slot else tensors), **rows}
        return BoundAdapter(held, tensors, strict, bound, fitted.coverage, self.memory, is_slot)
