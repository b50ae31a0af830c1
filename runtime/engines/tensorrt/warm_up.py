"""Inputs of a first run: zeros, at the shapes that a profile is tuned for."""

from collections.abc import Mapping
from dataclasses import replace

from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.runtime.manifest import Manifest, Range
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import pack
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


def warm_up_inputs(
    manifest: Manifest, ranges: Mapping[str, Range], memory: CudaMemory
) -> TensorMap:
    """Return all inputs of a run of the base model, in one buffer of zeros.

    Those that an output is written to have memory of their own; all others are only read, and
    share what is left.

    Raises:
        BackendError: the device is out of memory.
    """
    shapes = {name: r.opt for name, r in ranges.items()}
    if not manifest.max_loras:  # the ranks of empty slots are 0
        for name, (site, factor) in manifest.lora_bindings.items():
            shapes[name] = site.shape(factor, MIN_RANK)
    inputs = {b.name: Tensor(0, shapes[b.name], b.dtype, memory.device) for b in manifest.inputs}
    written = {output.in_place_of for output in manifest.outputs}
    start, places = pack({n: t for n, t in inputs.items() if n in written}, memory.device)
    places |= {n: replace(t, pointer=start) for n, t in inputs.items() if n not in written}
    zeros = memory.zeros(max(place.pointer + place.nbytes for place in places.values()))
    return TensorMap(
        (name, replace(place, pointer=zeros.pointer + place.pointer, owner=zeros))
        for name, place in places.items()
    )
