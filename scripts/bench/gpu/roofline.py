"""Roofline of LoRA in microseconds: bytes, operations and launches.

docs/benchmarks/gpu.md has the formulas, and tables of what they say. Bytes of a LoRA group: x, A,
B, and every pass over y; the operands have two bytes. A call lasts as long as its bytes or its
operations, whichever is longer; a node of a graph that waits for the one before costs its launch
besides.
"""

from dataclasses import dataclass

from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B, LinearShape, ModelShape

ITEM_BYTES = 2
# An H200, measured: a device-to-device copy counting both ways, and a bf16 product of random data.
BYTES_PER_US = 4.3e6
FLOP_PER_US = 790e6
LAUNCH_US = (1.5, 2.5)  # a dependent node of a captured graph: the lowest and highest reported
LATENCY_US = 4.0  # of a small kernel: two trips to memory, a reduction, the drain
# An H100, measured elsewhere (arXiv 2402.13499): cycles of a load past the caches, and clock.
LOAD_CYCLES = 478
CYCLES_PER_US = 1755
# Between two instructions of a warp: two share a scheduler, or each waits for the one before.
ISSUE_CYCLES = (2, 4)
HEAD_ROWS = 128  # up to so many rows the head computes logits for all, above for the last alone


@dataclass(frozen=True)
class LaunchCost:
    """Cost a method adds to a layer: nodes of the graph, and passes over x, t, y, A and B."""

    nodes: int  # more than without LoRA
    hidden: int = 0  # of these, so many run beside a product: at best nobody waits for them
    shares_x: bool = False  # sites that read the same x read it once
    passes_over_y: int = 2  # read and written; 4 where the delta goes through memory first
    keeps_t: bool = False  # t = x @ A stays on the chip
    passes_over_ab: int = 1  # 3 where both are copied to where they are padded first


LAUNCH_COSTS = {
    "ours": LaunchCost(4, shares_x=True, keeps_t=True),
    "ours_two_streams": LaunchCost(4, hidden=4, shares_x=True, keeps_t=True),
    "vllm": LaunchCost(12, shares_x=True),
    "addmm": LaunchCost(14),
    "pair_add": LaunchCost(21, passes_over_y=4),
    "peft": LaunchCost(28, passes_over_y=6),
    "native_static": LaunchCost(11, passes_over_y=4),
    "native_dynamic": LaunchCost(25, passes_over_y=4, passes_over_ab=3),
    "compiled_pair": LaunchCost(14),
}


def linear_us(linear: LinearShape, m: int) -> float:
    """Return the time of `x [m, k] @ W [k, n]` alone."""
    moved = linear.k * linear.n + m * (linear.k + linear.n)
    return _us(ITEM_BYTES * moved, 2 * m * linear.k * linear.n)


def step_us(m: int, model: ModelShape = LLAMA_3_8B) -> float:
    """Return the time of one step of the base: every layer's linears, and the head."""
    head = LinearShape("head", model.hidden, model.vocabulary)
    rows = m if m <= HEAD_ROWS else 1
    layer = sum(linear_us(linear, m) for linear in model.linears)
    return model.layers * layer + linear_us(head, rows)


def adapter_bytes(rank: int, model: ModelShape = LLAMA_3_8B) -> int:
    """Return the size of an adapter on all linears."""
    return model.layers * sum(_ab_bytes(linear, rank) for linear in model.linears)


def adapters_us(group: tuple[LinearShape, ...], rank: int, adapters: int) -> float:
    """Return the time of the bytes of so many adapters' A and B in one group, and of nothing else.

    No call whose rows take that many can be faster, unless a cache holds some of them.
    """
    return adapters * sum(_ab_bytes(linear, rank) for linear in group) / BYTES_PER_US


def group_us(
    group: tuple[LinearShape, ...], m: int, rank: int, cost: LaunchCost, adapters: int = 1
) -> float:
    """Return the time of one group's bytes or operations, without launches.

    Args:
        group: the linears.
        m: rows.
        rank: of every adapter.
        cost: of the method.
        adapters: that the rows take.
    """
    operations = sum(2 * m * rank * (linear.k + linear.n) for linear in group)
    return _us(_group_bytes(group, m, rank, cost, adapters), operations)


def bytes_us(m: int, rank: int, cost: LaunchCost, model: ModelShape = LLAMA_3_8B) -> float:
    """Return what LoRA adds to a step if launches were free."""
    layer = sum(group_us(group, m, rank, cost) for group in model.groups.values())
    return model.layers * layer


def overhead_percent(
    m: int, rank: int, cost: LaunchCost, model: ModelShape = LLAMA_3_8B
) -> tuple[float, float]:
    """Return what LoRA adds to a step, in percent of the base: at least, and at most.

    At least with the shorter launch and nothing waiting for hidden nodes.
    """
    moved, base = bytes_us(m, rank, cost, model), step_us(m, model)
    waited = (cost.nodes - cost.hidden, cost.nodes)
    low, high = (
        100 * (model.layers * nodes * launch + moved) / base
        for nodes, launch in zip(waited, LAUNCH_US, strict=True)
    )
    return low, high


def path_us(instructions: int, load_rounds: int) -> tuple[float, float]:
    """Return how long a kernel runs that moves next to nothing: at least, and at most.

    Args:
        instructions: that the longest warp issues.
        load_rounds: loads of global memory one of which waits for another.
    """
    loads = load_rounds * LOAD_CYCLES
    low, high = ((instructions * cycles + loads) / CYCLES_PER_US for cycles in ISSUE_CYCLES)
    return low, high


def _group_bytes(
    group: tuple[LinearShape, ...], m: int, rank: int, cost: LaunchCost, adapters: int
) -> int:
    inputs = group[:1] if cost.shares_x else group
    x = sum(m * linear.k for linear in inputs) * ITEM_BYTES
    t = 0 if cost.keeps_t else 2 * m * rank * len(group) * ITEM_BYTES
    y = cost.passes_over_y * sum(m * linear.n for linear in group) * ITEM_BYTES
    ab = adapters * sum(_ab_bytes(linear, rank) for linear in group)
    return x + t + y + cost.passes_over_ab * ab


def _ab_bytes(linear: LinearShape, rank: int) -> int:
    return rank * (linear.k + linear.n) * ITEM_BYTES


def _us(moved: float, operations: float) -> float:
    return max(moved / BYTES_PER_US, operations / FLOP_PER_US)
