"""Llama-3-8B without its weights: the shapes of its linears, and the manifest of an engine of it.

Nothing of the builder is imported here: a machine with a GPU need not have what builds a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.runtime.engines.topk import Floats, TopK, TopKRun
from trt_lora.runtime.manifest import BaseModel, Manifest
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

LAYERS = 32


@dataclass(frozen=True)
class LinearShape:
    """`y [m, n] = x [m, k] @ W`, with A [k, rank] and B [rank, n] beside it."""

    name: str
    k: int
    n: int


@dataclass(frozen=True)
class LayerShape:
    """The widths of a decoder layer."""

    hidden: int = 4096
    keys: int = 1024  # width of k and of v
    inner: int = 14336
    queries: int = 0  # width of q; 0: as hidden

    @property
    def groups(self) -> Mapping[str, tuple[LinearShape, ...]]:
        """Linears by group, in the order in which a layer runs them."""
        hidden, keys, inner = self.hidden, self.keys, self.inner
        queries = self.queries or hidden
        return {
            "qkv": (
                LinearShape("self_attn.q_proj", hidden, queries),
                LinearShape("self_attn.k_proj", hidden, keys),
                LinearShape("self_attn.v_proj", hidden, keys),
            ),
            "o": (LinearShape("self_attn.o_proj", queries, hidden),),
            "gate_up": (
                LinearShape("mlp.gate_proj", hidden, inner),
                LinearShape("mlp.up_proj", hidden, inner),
            ),
            "down": (LinearShape("mlp.down_proj", inner, hidden),),
        }


LLAMA_3_8B = LayerShape()
QWEN3_600M = LayerShape(hidden=1024, keys=1024, inner=3072, queries=2048)


def llama_manifest(dtype: str) -> Manifest:
    """Return a manifest with the seven linears of 32 layers: 448 bindings."""
    linears = [linear for group in LLAMA_3_8B.groups.values() for linear in group]
    sites = tuple(
        Site(f"model.layers.{layer}.{linear.name}", linear.k, linear.n, dtype)
        for layer in range(LAYERS)
        for linear in linears
    )
    base = BaseModel("Llama-3-8B", "LlamaForCausalLM", "", (), 0, 128)
    return Manifest(
        base, BindingNames.LORA, sites, (), (), {},
        max_batch_size=1, max_input_len=1, max_seq_len=2, max_lora_rank=512, opt_lora_rank=16,
        dtype=dtype, flavour="none", versions={}, files={},
    )  # fmt: skip


@dataclass
class IdleEngine:
    """All that holders of adapters ask of an executor; it runs nothing."""

    manifest: Manifest
    memory: Memory
    rank_multiple: int = 1
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    def release_inputs(self) -> None:
        """Nothing has run."""

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Nothing is run here."""
        raise NotImplementedError

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> TopKRun:
        """Nothing is run here."""
        raise NotImplementedError

    def topk(self, logits: Tensor, temperatures: Floats) -> TopK:
        """Nothing is run here."""
        raise NotImplementedError
