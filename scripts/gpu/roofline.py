"""What the hardware allows, in microseconds: bytes, operations and launches.

The formulas of `performance.md`, sections 3a to 3d. Bytes of a LoRA group: x, A, B, and every pass
over y; the operands have two bytes. A call lasts as long as its bytes or its operations, whichever
is longer; a node of a graph that waits for the one before costs its launch besides.
"""

from dataclasses import dataclass

from trt_lora.scripts.gpu.shapes import LLAMA_3_8B, Linear, ModelShape

ITEM_BYTES = 2
# An H200, measured: a device-to-device copy counting both ways, and a bf16 product of random data.
BYTES_PER_US = 4.3e6
FLOP_PER_US = 790e6
LAUNCH_US = (1.5, 2.5)  # a dependent node of a captured graph: the lowest and highest reported
HEAD_ROWS = 128  # up to so many rows the head computes logits for all, above for the last alone


@dataclass(frozen=True)
class Scheme:
    """How LoRA is added to a layer: nodes of the graph, and passes over x, t, y, A and B."""

    nodes: int  # more than without LoRA, one after another
    shares_x: bool = False  # sites that read the same x read it once
    passes_over_y: int = 2  # read and written; 4 where the delta goes through memory first
    keeps_t: bool = False  # t = x @ A stays on the chip
    passes_over_ab: int = 1  # 3 where both are copied to where they are padded first


SCHEMES = {
    # gate_up runs beside the base's own product, so three of the four nodes are waited for.
    "ours": Scheme(3, shares_x=True, keeps_t=True),
    "ours_one_stream": Scheme(4, shares_x=True, keeps_t=True),
    "vllm": Scheme(12, shares_x=True),
    "addmm": Scheme(14),
    "pair_add": Scheme(21, passes_over_y=4),
    "peft": Scheme(28, passes_over_y=6),
    "native_static": Scheme(11, passes_over_y=4),
    "native_dynamic": Scheme(25, passes_over_y=4, passes_over_ab=3),
    "compiled_pair": Scheme(14),
}


def linear_us(linear: Linear, m: int) -> float:
    """Return the time of `x [m, k] @ W [k, n]` alone."""
    moved = linear.k * linear.n + m * (linear.k + linear.n)
    return _us(ITEM_BYTES * moved, 2 * m * linear.k * linear.n)


def step_us(m: int, model: ModelShape = LLAMA_3_8B) -> float:
    """Return the time of one step of the base: every layer's linears, and the head."""
    head = Linear("head", model.hidden, model.vocabulary)
    rows = m if m <= HEAD_ROWS else 1
    layer = sum(linear_us(linear, m) for linear in model.linears)
    return model.layers * layer + linear_us(head, rows)


def adapter_bytes(rank: int, model: ModelShape = LLAMA_3_8B) -> int:
    """Return the size of an adapter on all linears."""
    return model.layers * sum(_ab_bytes(linear, rank) for linear in model.linears)


def group_us(group: tuple[Linear, ...], m: int, rank: int, scheme: Scheme) -> float:
    """Return the time of one group's bytes or operations, without launches."""
    operations = sum(2 * m * rank * (linear.k + linear.n) for linear in group)
    return _us(_group_bytes(group, m, rank, scheme), operations)


def bytes_us(m: int, rank: int, scheme: Scheme, model: ModelShape = LLAMA_3_8B) -> float:
    """Return what LoRA adds to a step if launches were free."""
    layer = sum(group_us(group, m, rank, scheme) for group in model.groups.values())
    return model.layers * layer


def overhead_percent(
    m: int, rank: int, scheme: Scheme, model: ModelShape = LLAMA_3_8B
) -> tuple[float, float]:
    """Return what LoRA adds to a step, in percent of the base, for either launch time."""
    moved, base = bytes_us(m, rank, scheme, model), step_us(m, model)
    nodes = scheme.nodes * model.layers
    low, high = (100 * (nodes * launch + moved) / base for launch in LAUNCH_US)
    return low, high


def _group_bytes(group: tuple[Linear, ...], m: int, rank: int, scheme: Scheme) -> int:
    inputs = group[:1] if scheme.shares_x else group
    x = sum(m * linear.k for linear in inputs) * ITEM_BYTES
    t = 0 if scheme.keeps_t else 2 * m * rank * len(group) * ITEM_BYTES
    y = scheme.passes_over_y * sum(m * linear.n for linear in group) * ITEM_BYTES
    return x + t + y + scheme.passes_over_ab * sum(_ab_bytes(linear, rank) for linear in group)


def _ab_bytes(linear: Linear, rank: int) -> int:
    return rank * (linear.k + linear.n) * ITEM_BYTES


def _us(moved: float, operations: float) -> float:
    return max(moved / BYTES_PER_US, operations / FLOP_PER_US)
