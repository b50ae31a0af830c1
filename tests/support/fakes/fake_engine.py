"""Stand-ins for an engine: a small manifest, its weights, executors that promise the minimum."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.fakes.executed_run import ExecutedRun

from trt_lora.plugins.contract.sites import BindingNames, Factor, Site
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.manifest import BaseModel, Binding, Dimension, Manifest, Range
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.host import Blocks, HostMemory, Memory, Stream
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_storage

FACTORS: tuple[Factor, Factor] = ("A", "B")
VOCAB = 11
MAX_LEN = 32
CACHES = {"key": ("batch", 2, MAX_LEN, 3), "value": ("batch", 2, MAX_LEN, 5)}


def make_manifest(
    *, k: int = 8, n: int = 6, dtype: str = "float32", names: BindingNames = BindingNames.LORA
) -> Manifest:
    """q_proj and v_proj of two layers take LoRA up to rank 16; 32 tokens in all.

    Its keys and values have widths of their own.
    """
    paths = [f"model.layers.{i}.self_attn.{p}" for i in (0, 1) for p in ("q_proj", "v_proj")]
    sites = tuple(Site(path, k, n, dtype) for path in paths)
    loras: dict[str, tuple[Site, Factor]] = {
        names.binding(f, site.path): (site, f) for site in sites for f in FACTORS
    }
    caches = [Binding(f"cache.0.{kind}", dtype, shape) for kind, shape in CACHES.items()]
    return Manifest(
        base_model=BaseModel("tiny", "TinyForCausalLM", "0" * 64, (2,), 0),
        binding_names=names,
        sites=sites,
        inputs=(
            Binding("input_ids", "int64", ("batch", "sequence")),
            Binding("lengths", "int64", ("batch",)),
            Binding("kept", "int64", ("kept",)),
            Binding("bound", "bool", ("bound",)),
            *caches,
            *(Binding(name, dtype, _symbolic(names, site, f)) for name, (site, f) in loras.items()),
        ),
        outputs=(
            Binding("logits", dtype, ("kept", VOCAB)),
            *(replace(b, name=f"new_{b.name}", in_place_of=b.name) for b in caches),
        ),
        profiles={
            "all": {b: Range(*(s.shape(f, r) for r in (1, 8, 16))) for b, (s, f) in loras.items()}
        },
        max_batch_size=4,
        max_input_len=16,
        max_seq_len=MAX_LEN,
        max_lora_rank=16,
        opt_lora_rank=8,
        dtype=dtype,
        flavour="none",
        versions={"trt-lora": "0"},
        files={},
    )


def _symbolic(names: BindingNames, site: Site, factor: Factor) -> tuple[Dimension, ...]:
    """A's shape [k, rank], or B's [rank, n]."""
    rank = names.rank_symbol(site.path)
    return (site.k, rank) if factor == "A" else (rank, site.n)


def make_weights(manifest: Manifest, *, rank: int = 4, seed: int = 0) -> dict[str, Array]:
    """Random float32 A and B for every LoRA binding."""
    rng = np.random.default_rng(seed)
    shapes = {name: site.shape(f, rank) for name, (site, f) in manifest.lora_bindings.items()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_peft(directory: Path, tensors: Mapping[str, Array], **fields: object) -> Path:
    """A PEFT directory; tensors are called `<path>.lora_A` and completed to PEFT's names."""
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    full = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(full, directory / "adapter_model.safetensors")
    return directory


class FakeExecutor:
    """Answers every token t with t + 1, and writes tokens to the cache."""

    rank_multiple = 1

    def __init__(self, manifest: Manifest | None = None, memory: Memory | None = None) -> None:
        self.memory: Any = memory or HostMemory()
        self.manifest = manifest or make_manifest()
        self.input_names = tuple(binding.name for binding in self.manifest.inputs)
        self.output_names = tuple(binding.name for binding in self.manifest.outputs)
        self.calls: list[dict[str, Array]] = []  # copies of the inputs that are no LoRA bindings

    def release_inputs(self) -> None:
        """Nothing of a run stays."""

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        loras = self.manifest.lora_bindings
        feeds = {
            b: tensor_map[b].numpy().copy()
            for b in self.input_names
            if b not in loras and not b.startswith("cache.")
        }
        self.calls.append(feeds)
        ids, storage = feeds["input_ids"], storage_dtype(self.manifest.dtype)
        for name in (name for name in self.input_names if name.startswith("cache.")):
            cache = tensor_map[name].numpy()
            for row, (length, tokens) in enumerate(zip(feeds["lengths"], ids, strict=True)):
                cache[row, :, length : length + len(tokens)] = tokens[None, :, None]
        kept = ids.reshape(-1)[feeds["kept"]]
        logits = np.eye(VOCAB, dtype=storage)[(kept + 1) % VOCAB]
        return {"logits": tensor_from_storage(logits, self.manifest.dtype)}

    def topk(self, logits: Tensor, temperatures: Array) -> HostTopK:
        return HostTopK.of(logits)

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> ExecutedRun:
        return ExecutedRun(self.execute, self.manifest, tensor_map, logits)


class FakeMemory:
    """Calls host memory a GPU, and keeps the names and the stream of every upload."""

    device = "cuda:7"

    def __init__(self) -> None:
        self.uploads: list[tuple[set[str], Stream]] = []

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        self.uploads.append((set(tensors), stream))
        return {name: replace(tensor, device=self.device) for name, tensor in tensors.items()}

    def zeros(self, nbytes: int, *, sparse: bool = False) -> Tensor:
        return replace(HostMemory().zeros(nbytes, sparse=sparse), device=self.device)

    def free_bytes(self) -> int:
        return HostMemory().free_bytes()

    def write(self, tensors: Mapping[int, Tensor]) -> None:
        HostMemory().write(tensors)

    def copy(self, target: int, source: int, blocks: Blocks) -> None:
        HostMemory().copy(target, source, blocks)

    def clear(self, pointer: int, blocks: Blocks) -> None:
        HostMemory().clear(pointer, blocks)


class FakeExecutorWithMemory(FakeExecutor):
    """An executor whose tensors live elsewhere."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        super().__init__(manifest, FakeMemory())
