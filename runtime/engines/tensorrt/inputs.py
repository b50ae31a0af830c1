"""Inputs of a run, their profile, and the shapes of outputs that follow; inputs of a first run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, attrgetter, le
from typing import Any

from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.tensorrt.run_key import RunState
from trt_lora.runtime.manifest import Dimension, Manifest, Range
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import in_buffer, pack
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap

# All that is asked of an input, in one call: an engine has hundreds, and this runs at every step.
_describe = attrgetter("pointer", "shape", "dtype", "device")


class RunInputs:
    """The inputs of the last run; most of them are those of the next."""

    def __init__(self, manifest: Manifest, memory: CudaMemory) -> None:
        self._manifest = manifest
        self._memory = memory
        self._dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
        self._order = {name: index for index, name in enumerate(self._dtypes)}
        self._outputs = {b.in_place_of: b.name for b in manifest.outputs if b.in_place_of}
        self._on_host: set[str] = set()
        self._ranges = {
            name: [(1 << i, ranges[name]) for i, ranges in enumerate(manifest.profiles.values())]
            for name in self._dtypes
        }
        self._seen: dict[str, tuple[Any, ...]] = {}  # what `_describe` said
        self._allowing: dict[str, int] = {}  # bit i is set if profile i allows the input's shape

    @property
    def on_host(self) -> list[str]:
        """Inputs that have to be copied, in the engine's order: always the same, as its layout."""
        return sorted(self._on_host, key=self._order.__getitem__)

    def update(self, tensor_map: TensorMap, state: RunState) -> int:
        """Check what changed, put what is on the device into `state`; return the profile.

        An output in place of an input is put there with it.

        Raises:
            TensorError: an input is missing, or has a shape, dtype or place the engine refuses.
        """
        if not self._dtypes.keys() <= tensor_map.keys():
            check_inputs(tensor_map, self._dtypes)
        seen = self._seen
        for name in self._dtypes:
            tensor = tensor_map[name]
            found = _describe(tensor)
            if seen.get(name) != found:
                self._check_changed(name, tensor, state)
                seen[name] = found  # last: an input that was refused is looked at again
        return self._profile(tensor_map)

    def _check_changed(self, name: str, tensor: Tensor, state: RunState) -> None:
        if tensor.dtype != self._dtypes[name]:
            raise TensorError(f"{name} is {tensor.dtype}; this engine takes {self._dtypes[name]}")
        self._memory.check(name, tensor)
        output = self._outputs.get(name)
        if output and tensor.device == HOST:
            raise TensorError(
                f"{name} lies on the host, and {output} is written to its memory; "
                "pass memory of the engine, as KVCache or engine.memory.upload makes it"
            )
        if name not in self._seen or self._seen[name][1] != tensor.shape:
            bits = (bit for bit, r in self._ranges[name] if allows(r, tensor.shape))
            self._allowing[name] = sum(bits)
        if tensor.device == HOST:
            self._on_host.add(name)  # put into the state at every run, where it is copied to
        else:
            self._on_host.discard(name)
            state.put(name, (tensor.pointer, tensor.shape))
            if output:
                state.put(output, (tensor.pointer, tensor.shape))

    def _profile(self, tensor_map: TensorMap) -> int:
        """The first profile that allows all shapes."""
        allowing = reduce(and_, self._allowing.values())
        if not allowing:
            raise TensorError(_refusal(self._manifest.profiles, tensor_map))
        return (allowing & -allowing).bit_length() - 1


def _refusal(profiles: Mapping[str, Mapping[str, Range]], tensor_map: TensorMap) -> str:
    """Name the first input that the last profile refuses, and what all of them allow."""
    *_, last = profiles.values()
    name = next(name for name, r in last.items() if not allows(r, tensor_map[name].shape))
    allowed = "; ".join(
        f"{profile}: {list(ranges[name].min)} to {list(ranges[name].max)}"
        for profile, ranges in profiles.items()
    )
    return f"{name} has shape {list(tensor_map[name].shape)}; this engine allows {allowed}"


def allows(allowed: Range, shape: Sequence[int]) -> bool:
    """Return whether a shape lies in a range."""
    return (
        len(shape) == len(allowed.min)
        and all(map(le, allowed.min, shape))
        and all(map(le, shape, allowed.max))
    )


class OutputShapes:
    """Source of each output dimension: an input and its axis. Outputs in place are left out.

    TensorRT knows the shapes too, but only of a context on which all inputs are set; a captured
    graph is launched without touching one. Where a context is set, it must agree.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Look symbols up by name, as TensorRT does: equally named dimensions are equal.

        Raises:
            BackendError: an output has a symbol that no input has.
        """
        found: dict[str, tuple[str, int]] = {
            size: (binding.name, axis)
            for binding in reversed(manifest.inputs)  # the first input that has it wins
            for axis, size in enumerate(binding.shape)
            if isinstance(size, str)
        }
        new = [binding for binding in manifest.outputs if not binding.in_place_of]
        self._outputs = [
            (b.name, b.dtype, [_source(b.name, size, found) for size in b.shape]) for b in new
        ]

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return every output that needs memory of its own, still without an address."""
        found = {}
        for name, dtype, sizes in self._outputs:
            shape = tuple(d if isinstance(d, int) else inputs[d[0]].shape[d[1]] for d in sizes)
            found[name] = Tensor(0, shape, dtype)
        return found


def _source(
    output: str, size: Dimension, found: Mapping[str, tuple[str, int]]
) -> int | tuple[str, int]:
    if isinstance(size, int):
        return size
    if size not in found:
        raise BackendError(
            f"dimension {size!r} of output {output} is none of any input ({', '.join(found)}); "
            "the manifest is of another engine, build it again"
        )
    return found[size]


def warm_up_inputs(
    manifest: Manifest, ranges: Mapping[str, Range], memory: CudaMemory
) -> TensorMap:
    """Return all inputs of a run of the base model: zeros, at the shapes a profile is tuned for.

    Those that an output is written to have memory of their own; all others are only read, and
    share what is left.

    Raises:
        BackendError: the device is out of memory.
    """
    shapes = {name: r.opt for name, r in ranges.items()}
    if not manifest.max_loras:  # the ranks of empty slots are 0
        for name, (site, factor) in manifest.lora_bindings.items():
            if name in shapes:  # else it is of the engine's other graph
                shapes[name] = site.shape(factor, MIN_RANK)
    inputs = {b.name: Tensor(0, shapes[b.name], b.dtype, memory.device) for b in manifest.inputs}
    written = {output.in_place_of for output in manifest.outputs}
    start, places = pack({n: t for n, t in inputs.items() if n in written}, memory.device)
    places |= {n: replace(t, pointer=start) for n, t in inputs.items() if n not in written}
    zeros = memory.zeros(max(place.pointer + place.nbytes for place in places.values()))
    return TensorMap(in_buffer(places, zeros.pointer, zeros))
