"""Table of LoRA target modules: TensorRT-LLM's names and ids, and their Hugging Face names.

Ids 0 to 25 are those of TensorRT-LLM's `LoraModuleType`. Two of its names surprise: in a gated MLP
`mlp_h_to_4h` is the linear under the activation (`gate_proj`) and `mlp_gate` the other factor
(`up_proj`), as its own checkpoint converter maps them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean

Parallel = Literal["column", "row", "replicated"]

ALL_LINEAR = "all-linear"
ROUTER = "moe_router"  # finds tokens their experts
EXPERTS_GATE_UP = "moe_gate_up"  # gate and up of all experts, one parameter in transformers' models
EXPERTS_DOWN = "moe_4h_to_h"
EMBEDDING = "embed_tokens"  # rows by token ids: A [V, r] is read as the embedding is
HEAD = "lm_head"


@dataclass(frozen=True)
class Module:
    """One row of the table."""

    id: int | None  # None: TensorRT-LLM has none
    name: str
    parallel: Parallel  # which dimension tensor parallelism splits: column is n, row is k
    suffixes: tuple[str, ...] = ()  # ends of the module's path in transformers' models


# With their parent: an MLP's linear may be called dense too.
_DENSE = ("attention.dense", "self_attention.dense", "self_attn.dense", "SelfAttention.o")
_T5_UP, _T5_DOWN = ("DenseReluDense.wi", "DenseReluDense.wi_0"), "DenseReluDense.wo"

_ROUTERS = ("mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router")

MODULES = (
    Module(0, "attn_qkv", "column", ("qkv_proj", "c_attn", "query_key_value", "Wqkv")),
    Module(1, "attn_q", "column", ("q_proj", "SelfAttention.q")),
    Module(2, "attn_k", "column", ("k_proj", "SelfAttention.k")),
    Module(3, "attn_v", "column", ("v_proj", "SelfAttention.v")),
    Module(4, "attn_dense", "row", ("o_proj", "out_proj", "attn.c_proj", *_DENSE)),
    Module(5, "mlp_h_to_4h", "column", ("gate_proj", "c_fc", "fc1", "dense_h_to_4h", *_T5_UP)),
    Module(6, "mlp_4h_to_h", "row", ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h", _T5_DOWN)),
    Module(7, "mlp_gate", "column", ("up_proj", "DenseReluDense.wi_1")),
    Module(8, "cross_attn_qkv", "column"),
    Module(9, "cross_attn_q", "column", ("encoder_attn.q_proj", "EncDecAttention.q")),
    Module(10, "cross_attn_k", "column", ("encoder_attn.k_proj", "EncDecAttention.k")),
    Module(11, "cross_attn_v", "column", ("encoder_attn.v_proj", "EncDecAttention.v")),
    Module(12, "cross_attn_dense", "row", ("encoder_attn.out_proj", "EncDecAttention.o")),
    Module(13, "moe_h_to_4h", "column", ("w1", "experts.gate_proj")),
    Module(14, "moe_4h_to_h", "row", ("w2", "experts.down_proj")),
    Module(15, "moe_gate", "column", ("w3", "experts.up_proj")),
    Module(16, ROUTER, "replicated", ("mlp.gate", *_ROUTERS)),
    Module(17, "mlp_router", "replicated", ("shared_expert_gate",)),
    Module(18, "mlp_gate_up", "column", ("gate_up_proj",)),
    Module(19, "shared_expert_h_to_4h", "column", ("shared_expert.gate_proj",)),
    Module(20, "shared_expert_4h_to_h", "row", ("shared_expert.down_proj",)),
    Module(21, "shared_expert_gate", "column", ("shared_expert.up_proj",)),
    Module(22, "mamba_in_proj", "column", ("mixer.in_proj",)),
    Module(23, "mamba_out_proj", "row", ("mixer.out_proj",)),
    Module(24, "moe_latent_fc1", "replicated", ("fc1_latent_proj",)),
    Module(25, "moe_latent_fc2", "replicated", ("fc2_latent_proj",)),
    Module(None, EXPERTS_GATE_UP, "column", ("experts.gate_up_proj",)),
    Module(None, HEAD, "column", (HEAD, "embed_out")),
    Module(None, EMBEDDING, "replicated", (EMBEDDING, "wte", "embed_in", "word_embeddings")),
)
"""The whole table, in the order of the ids; what has none last."""

# What a fused module is made of, in the order of its outputs; a path's last part names the sibling.
PARTS = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "cross_attn_qkv": ("cross_attn_q", "cross_attn_k", "cross_attn_v"),
    "mlp_gate_up": ("mlp_h_to_4h", "mlp_gate"),
    EXPERTS_GATE_UP: ("moe_h_to_4h", "moe_gate"),
}

PART_SUFFIXES = {module.name: module.suffixes[0] for module in MODULES if module.suffixes}
"""Last part of a module's path, by TensorRT-LLM's name."""

# Fused modules whose outputs alternate head by head: their parts are no blocks.
_INTERLEAVED = ("query_key_value",)

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""What experts are made of in transformers' models, in the order of their declaration."""

_BY_NAME = {module.name: module for module in MODULES}
_BY_SUFFIX = {suffix: module for module in MODULES for suffix in module.suffixes}
# Linears of one expert, as they are called in older releases of transformers.
_ONE_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<number>\d{1,6})\.(?P<name>[^.]+)")
_LONGEST = max(suffix.count(".") + 1 for suffix in _BY_SUFFIX)


def module_of(path: str) -> Module | None:
    """Return the module of a path such as `transformer.h.0.attn.c_proj`; the longest end wins."""
    if one := expert_of(path):
        path = f"{one[0]}.{one[2]}"
    parts = path.rsplit(".", _LONGEST)[-_LONGEST:]
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_BY_SUFFIX[end] for end in ends if end in _BY_SUFFIX), None)


def expert_of(path: str) -> tuple[str, int, str] | None:
    """Return of a linear of one expert the path of all, its number and its name."""
    match = _ONE_EXPERT.fullmatch(path)
    return (match["experts"], int(match["number"]), match["name"]) if match else None


def is_experts(path: str) -> bool:
    """Return whether a path is that of a matrix of all experts together."""
    parent, _, name = path.rpartition(".")
    return parent.rpartition(".")[2] == "experts" and name in EXPERT_PARAMETERS


def target_names(path: str) -> frozenset[str]:
    """Return the module names that mean the matrix at a path.

    Gate and up of experts come together: each of their names means both.
    """
    module, both = module_of(path), frozenset({EXPERTS_GATE_UP, *PARTS[EXPERTS_GATE_UP]})
    if module is None:
        return frozenset()
    return both if module.name in both else frozenset({module.name})


def is_embedding(path: str) -> bool:
    """Return whether a module is one that reads rows by token ids."""
    module = module_of(path)
    return module is not None and module.name == EMBEDDING


def is_head(path: str) -> bool:
    """Return whether a module is an output head, by its name."""
    module = module_of(path)
    return module is not None and module.name == HEAD


def is_router(path: str) -> bool:
    """Return whether a module finds tokens their experts: it has a matrix and is no linear."""
    module = module_of(path)
    return module is not None and module.name == ROUTER


def parts_of(path: str) -> tuple[str, ...]:
    """Return the modules whose outputs follow one another in a fused module's; empty if none do."""
    module = module_of(path)
    if module is None or path.endswith(_INTERLEAVED):
        return ()
    return PARTS.get(module.name, ())


def known_targets() -> list[str]:
    """Return every name that `resolve_targets` accepts."""
    return [ALL_LINEAR, *_BY_NAME, *sorted(set(_last_parts()) - _BY_NAME.keys())]


def resolve_targets(targets: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, for each target, the module names it means; `all-linear` means itself.

    A Hugging Face suffix means every module whose path may end so, as in PEFT: `c_proj` is both
    the attention's and the MLP's output. Experts are no modules in PEFT: their names alone mean
    them.

    Raises:
        ConfigError: a target is not known.
    """
    resolved = {target: _matches(target) for target in targets}
    for target, modules in resolved.items():
        if not modules:
            known = known_targets()
            raise ConfigError(
                f"unknown LoRA target module {target!r}; choose from: {', '.join(known)}"
                f"{did_you_mean(target, known)}"
            )
    return resolved


def _matches(target: str) -> frozenset[str]:
    if target == ALL_LINEAR or target in _BY_NAME:
        return frozenset({target})
    return frozenset(
        module.name
        for suffix, module in _BY_SUFFIX.items()
        if suffix == target or (suffix.endswith(f".{target}") and not suffix.startswith("experts."))
    )


def _last_parts() -> Iterable[str]:
    return (suffix.rsplit(".", 1)[-1] for suffix in _BY_SUFFIX)
