"""A TensorRT without a GPU: a stand-in for `tensorrt_rtx` that runs one tiny model on a `FakeCuda`.

The model has everything an engine of this package has: tokens, mask, positions, a cache and LoRA
sites of different shapes:

    x = embedding[input_ids] + 0.1 * position_ids          present = past, then x
    h = the sum of what the mask shows of present, up to each position
    logits = down(up(h)), both with LoRA
"""

# the classes and methods have NVIDIA's names
import sys
import weakref
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_cuda import ALIGNMENT, FakeCuda, Work

from trt_lora.plugins.contract import BindingNames, Site
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    PLAN_FILE,
    BaseModel,
    Binding,
    Manifest,
    Range,
    file_record,
)
from trt_lora.runtime.tensors import Array, storage_dtype

Floats = npt.NDArray[np.float64]

VOCABULARY, WIDTH, INNER = 11, 4, 6
MAX_BATCH, MAX_PROMPT, MAX_TOKENS, MAX_RANK = 2, 8, 16, 4
UP = Site("model.layers.0.up", WIDTH, INNER, "float32")
DOWN = Site("model.layers.0.down", INNER, VOCABULARY, "float32")
PAST, PRESENT = "past_key_values.0.key", "present.0.key"
PLAN = b"the plan of the tiny model"

_random = np.random.default_rng(7)
EMBEDDING: Floats = _random.normal(size=(VOCABULARY, WIDTH))
BASE: dict[str, Floats] = {site.path: _random.normal(size=(site.k, site.n)) for site in (UP, DOWN)}


def small_manifest(flavour: str = "tensorrt-rtx", dtype: str = "float32") -> Manifest:
    """Return the manifest of the tiny model."""
    rank = (1, 2, MAX_RANK)
    batch = (1, 1, MAX_BATCH)
    sizes: dict[str, dict[str, tuple[int, int, int]]] = {
        "decode": {
            "sequence": (1, 1, 1),
            "past": (1, 8, MAX_TOKENS - 1),
            "total": (2, 9, MAX_TOKENS),
            "kept": (1, 1, 1),
        },
        "prefill": {
            "sequence": (1, MAX_PROMPT, MAX_PROMPT),
            "past": (0, 0, MAX_TOKENS - 1),
            "total": (1, MAX_PROMPT, MAX_TOKENS),
            "kept": (1, 1, MAX_PROMPT),
        },
    }
    inputs = (
        Binding("input_ids", "int64", ("batch", "sequence")),
        Binding("attention_mask", "int64", ("batch", "total")),
        Binding("position_ids", "int64", ("batch", "sequence")),
        Binding("logits_to_keep", "int64", ("kept",)),
        Binding(PAST, "float32", ("batch", 1, "past", WIDTH)),
        *(
            Binding(f"lora_{factor}_{site.path}", site.dtype, shape)
            for site in (UP, DOWN)
            for factor, shape in (("A", (site.k, "rank")), ("B", ("rank", site.n)))
        ),
    )

    def allowed(binding: Binding, symbols: Mapping[str, tuple[int, int, int]]) -> Range:
        known = {**symbols, "batch": batch, "rank": rank}
        triples = [known[d] if isinstance(d, str) else (d, d, d) for d in binding.shape]
        return Range(*(tuple(triple[i] for triple in triples) for i in range(3)))

    return Manifest(
        base_model=BaseModel("tiny", "TinyForCausalLM", "0" * 64, (0,), 0),
        binding_names=BindingNames.LORA,
        sites=(UP, DOWN),
        inputs=inputs,
        outputs=(
            Binding("logits", "float32", ("batch", "kept", VOCABULARY)),
            Binding(PRESENT, "float32", ("batch", 1, "total", WIDTH)),
        ),
        profiles={
            name: {binding.name: allowed(binding, symbols) for binding in inputs}
            for name, symbols in sizes.items()
        },
        max_batch_size=MAX_BATCH,
        max_input_len=MAX_PROMPT,
        max_seq_len=MAX_TOKENS,
        max_lora_rank=MAX_RANK,
        opt_lora_rank=2,
        dtype=dtype,
        flavour=flavour,
        versions={"tensorrt-rtx": "1.7"},
        files={},
    )


def engine_directory(directory: Path, manifest: Manifest | None = None) -> Path:
    """Write the plan and the manifest of the tiny model."""
    manifest = manifest or small_manifest()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PLAN_FILE).write_bytes(PLAN)
    fields = {**vars(manifest), "files": {PLAN_FILE: file_record(directory / PLAN_FILE)}}
    (directory / MANIFEST_FILE).write_text(Manifest(**fields).to_json(), encoding="utf-8")
    return directory


def tiny_model(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Compute the outputs in float32, as the engine does."""
    x = EMBEDDING.astype(np.float32)[inputs["input_ids"]]
    x = x + np.float32(0.1) * inputs["position_ids"][..., None].astype(np.float32)
    keys = np.concatenate([inputs[PAST], x[:, None]], axis=2)
    shown = keys[:, 0] * inputs["attention_mask"][..., None].astype(np.float32)
    h = shown.cumsum(axis=1, dtype=np.float32)[:, keys.shape[2] - x.shape[1] :]
    for site in (UP, DOWN):
        a, b = inputs[f"lora_A_{site.path}"], inputs[f"lora_B_{site.path}"]
        h = h @ BASE[site.path].astype(np.float32) + (h @ a) @ b
    return {"logits": h[:, inputs["logits_to_keep"]], PRESENT: keys}


def expected_logits(ids: npt.NDArray[np.int64], adapter: Mapping[str, Array]) -> Floats:
    """Return logits [s, vocab] of one sequence: in float64, without a cache, weights merged."""
    h: Floats = (EMBEDDING[ids] + 0.1 * np.arange(len(ids))[:, None]).cumsum(axis=0)
    for site in (UP, DOWN):
        weight = BASE[site.path]
        if f"lora_A_{site.path}" in adapter:
            a, b = (adapter[f"lora_{factor}_{site.path}"] for factor in ("A", "B"))
            weight = weight + a.astype(np.float64) @ b.astype(np.float64)
        h = h @ weight
    return h


class Dims:
    """A shape as TensorRT gives it: no tuple, but tuple() takes it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        """Return the number of dimensions."""
        return len(self._sizes)

    def __getitem__(self, axis: int) -> int:
        """Return one size."""
        return self._sizes[axis]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the sizes."""
        return iter(self._sizes)


class FakeLogger:
    """Takes messages of at least a severity."""

    class Severity(IntEnum):
        """TensorRT's levels."""

        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    ERROR = Severity.ERROR

    def __init__(self, min_severity: Severity = Severity.WARNING) -> None:
        self.min_severity = min_severity


class FakeTensorRT(ModuleType):
    """The module `tensorrt_rtx`, or `tensorrt`."""

    Logger = FakeLogger

    def __init__(self, cuda: FakeCuda, name: str = "tensorrt_rtx") -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.cuda = cuda
        self.manifest = small_manifest()
        self.refusals: set[str] = set()  # methods that answer False or None
        self.contexts: weakref.WeakSet[IExecutionContext] = weakref.WeakSet()
        self.bound: list[str] = []  # tensors whose address was set, in order
        self.profiles: list[int] = []  # profile of every run

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what `import tensorrt_rtx` finds."""
        monkeypatch.setitem(sys.modules, self.__name__, self)

    def Runtime(self, logger: FakeLogger) -> "Runtime":
        """Return a runtime, which keeps the logger."""
        return Runtime(self, logger)


class Runtime:
    """Loads plans."""

    def __init__(self, trt: FakeTensorRT, logger: FakeLogger) -> None:
        self._trt = trt
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        """Return the engine of a plan, which keeps the runtime, or None."""
        if serialized_engine != PLAN or "deserialize_cuda_engine" in self._trt.refusals:
            return None
        return ICudaEngine(self._trt, self)


class ICudaEngine:
    """A plan on the GPU."""

    def __init__(self, trt: FakeTensorRT, runtime: Runtime) -> None:
        self._trt = trt
        self._runtime = runtime

    def create_execution_context(self) -> "IExecutionContext | None":
        """Return a context, which keeps the engine, or None."""
        if "create_execution_context" in self._trt.refusals:
            return None
        return IExecutionContext(self._trt, self)


class IExecutionContext:
    """Shapes and addresses of one run after another."""

    def __init__(self, trt: FakeTensorRT, engine: ICudaEngine) -> None:
        self._trt = trt
        self._engine = engine
        self._profile = 0
        self._inputs = {binding.name: binding for binding in trt.manifest.inputs}
        self._outputs = {binding.name: binding for binding in trt.manifest.outputs}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._token = object()
        trt.contexts.add(self)
        weakref.finalize(self, _destroyed, trt.cuda, self._token)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Choose a profile; shapes and addresses are to be set again."""
        if "set_optimization_profile_async" in self._trt.refusals:
            return False
        self._shapes.clear()
        self._addresses.clear()
        self._profile = profile_index
        switch = Work("a profile switch", stream_handle, (), lambda: None, owner=self._token)
        self._trt.cuda.enqueue(switch)
        return profile_index < len(self._trt.manifest.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Set the shape of an input; False if the profile does not allow it."""
        if not isinstance(shape, tuple | list) or "set_input_shape" in self._trt.refusals:
            return False
        ranges = list(self._trt.manifest.profiles.values())[self._profile]
        if name not in ranges or len(shape) != len(ranges[name].min):
            return False
        limits = zip(ranges[name].min, shape, ranges[name].max, strict=True)
        if not all(low <= size <= high for low, size, high in limits):
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Set the address of an input or output."""
        if name not in self._inputs | self._outputs or "set_tensor_address" in self._trt.refusals:
            return False
        if not memory or memory % ALIGNMENT:
            self._trt.cuda.violate(f"TensorRT: the address {memory:#x} of {name} is not aligned")
        self._addresses[name] = memory
        self._trt.bound.append(name)
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        """Return the shape of a tensor, -1 where an input decides that is not set."""
        if name in self._inputs:
            return Dims(self._shapes[name])
        sizes: dict[str, int] = {}
        for binding in self._inputs.values():
            if binding.name in self._shapes:
                pairs = zip(binding.shape, self._shapes[binding.name], strict=True)
                sizes.update((symbol, size) for symbol, size in pairs if isinstance(symbol, str))
        shape = self._outputs[name].shape
        return Dims(tuple(sizes.get(d, -1) if isinstance(d, str) else d for d in shape))

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Enqueue a run; it reads the inputs when its turn comes."""
        if "execute_async_v3" in self._trt.refusals:
            return False
        cuda, places = self._trt.cuda, {}
        if stream_handle == 0:
            cuda.violate("TensorRT: the default stream costs an extra wait")
        for name, binding in (self._inputs | self._outputs).items():
            if name not in self._addresses or (name in self._inputs and name not in self._shapes):
                cuda.violate(f"TensorRT: shape or address of {name} is not set")
            shape = tuple(self.get_tensor_shape(name))
            places[name] = (self._addresses[name], shape, storage_dtype(binding.dtype))
        views = {
            name: cuda.view(address, int(np.prod(shape)) * dtype.itemsize)
            .view(dtype)
            .reshape(shape)
            for name, (address, shape, dtype) in places.items()
        }
        blocks = [
            block
            for name, (address, _, _) in places.items()
            for block in cuda.blocks_at(address, views[name].nbytes, f"TensorRT: {name}")
        ]

        def run() -> None:
            for name, value in tiny_model(views).items():
                views[name][...] = value

        cuda.enqueue(Work("a run", stream_handle, blocks, run, owner=self._token))
        self._trt.profiles.append(self._profile)
        return True


def _destroyed(cuda: FakeCuda, token: object) -> None:
    if cuda.pending(token):
        cuda.violations.append("TensorRT: a context is destroyed while it runs")


def signature_of(method: Any) -> list[list[str]]:
    """Parameter names of every overload of a method of the real library, read from its help."""
    overloads = [line for line in (method.__doc__ or "").splitlines() if ") -> " in line]
    names = []
    for line in overloads:
        inside = line[line.index("(") + 1 : line.rindex(") -> ")]
        names.append([part.split(":")[0].strip() for part in inside.split(", ") if ":" in part])
    return names
