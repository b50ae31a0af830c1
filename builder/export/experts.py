"""Experts of a mixture, as one node for a later pass to lower.

Registered with transformers beside our attention (`attention.py`); outside of a trace transformers'
own loop computes them.
"""

from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from trt_lora.builder.passes.experts.lowered import EXPERTS
from trt_lora.builder.passes.linears import EXPERTS_DOMAIN

_FLAGS = {  # of transformers' decorator of experts
    "has_gate": "experts without a gate",
    "has_bias": "experts with biases",
    "is_transposed": "experts whose weights are transposed",
    "is_concatenated": "experts whose gate and up are interleaved",
    "has_post_expert_norm": "experts with a norm",
}
_TAKEN = {"has_gate", "is_concatenated"}  # which of them are set in experts that are built


def run_experts(
    module: Any, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return what the chosen experts make of x, times their shares; the signature is transformers'.

    Args:
        module: with weights `gate_up_proj` [E, 2i, h] and `down_proj` [E, h, i].
        x: [t, h].
        chosen: the numbers of each token's experts [t, top].
        shares: of each of them [t, top].

    Returns:
        [t, h].
    """
    if not torch.compiler.is_exporting():
        own: torch.Tensor = type(module).forward.__wrapped__(module, x, chosen, shares)
        return own
    return torch.onnx.ops.symbolic(
        f"{EXPERTS_DOMAIN}::{EXPERTS}",
        (x, chosen, shares.to(x.dtype), module.gate_up_proj, module.down_proj),
        dtype=x.dtype,
        shape=x.shape,
        version=1,
    )


def experts_obstacle(module: Any) -> str:
    """Return why a module of experts cannot be built; empty if it can."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return "experts that transformers computes in a way of their own"
    faults = [text for flag, text in _FLAGS.items() if getattr(module, flag) != (flag in _TAKEN)]
    if type(module)._apply_gate is not _default_apply_gate:
        faults.append("experts with a gate of their own")
    elif not isinstance(act := getattr(module, "act_fn", None), SiLUActivation | torch.nn.SiLU):
        faults.append(f"experts with {type(act).__name__} instead of SiLU")
    return ", ".join(faults)
