"""Tiny mixtures of experts of every architecture that is built."""

from pathlib import Path
from typing import Any

from support.models.tiny_models import save_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LONG = {"max_position_embeddings": 400}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
# The fields of each architecture, and the parameter that its router is.
MIXTURES: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen2Moe": (_EXPERTS | LONG | {"shared_expert_intermediate_size": 40}, "mlp.gate.weight"),
    "Qwen3Moe": (_EXPERTS | LONG | {"head_dim": 8, "norm_topk_prob": True}, "mlp.gate.weight"),
    "Mixtral": (LOCAL, "mlp.gate.weight"),
    "Olmoe": ({"num_experts": 8, "num_experts_per_tok": 3}, "mlp.gate.weight"),
    "GraniteMoe": (LOCAL, "block_sparse_moe.router.weight"),
    "Phimoe": (LOCAL, "mlp.router.weight"),
}
TARGETS = ("all-linear", "moe_router")
WITH_EXPERTS = (*TARGETS, "moe_gate_up", "moe_4h_to_h")


def mixture(architecture: str, folder: Path) -> Path:
    """Save one; its weights are so large that adapters show."""
    fields: dict[str, Any] = {"initializer_range": 0.3} | MIXTURES[architecture][0]
    return save_model(architecture, folder / "model", **fields)


def expert_parameters(architecture: str) -> list[str]:
    """What PEFT calls the matrices of all experts, and the router."""
    router = MIXTURES[architecture][1]
    block = router.partition(".")[0]
    return [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj", router]
