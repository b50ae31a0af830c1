"""What the path model says of GPUs, before and after: the tables of docs/benchmarks/kernels.md.

python -m trt_lora.scripts.bench.gpu.predictions      prints them
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Launch, plan_launches
from trt_lora.plugins.kernels.nvrtc import SLOTS
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.gpu.path_model import (
    COUNTER_CYCLES,
    GPUS,
    KERNEL_CYCLES,
    GpuModel,
    bytes_us,
    call_us,
)
from trt_lora.scripts.bench.llama import LAYERS, LLAMA_3_8B, QWEN3_600M, LayerShape, LinearShape

RANK, SLOT_COUNT, ITEM_BYTES = 16, 8, 2
SIGNAL_US = 0.45  # of a node on a second stream: between a signal and a wait
IDLE_RANK = 1  # of the zeros that stand for no adapter
_STEPS = ("A100", "RTX 3090", "L40S", "H100", "RTX 5090")
_ALONE = ("RTX 4090", "L40S", "RTX 3090", "A10")
_MODELS = {"Llama-3-8B": LLAMA_3_8B, "Qwen3-0.6B": QWEN3_600M}
_CASES = ((1, 1), (8, 1), (32, 1), (8, SLOT_COUNT))  # rows, and the adapters that they take


def step_table() -> Iterator[str]:
    """Yield a row for each GPU: what LoRA adds to a step of Llama-3-8B, in microseconds."""
    yield "| GPU | base, ms | 1 row | 8 rows | 32 rows | 8 rows, 8 adapters |"
    yield "|---|---|---|---|---|---|"
    for name in _STEPS:
        gpu = GPUS[name]
        base = sum(_gemm_us(linears, gpu) for linears in LLAMA_3_8B.groups.values()) * LAYERS
        cells = (_step_cell(gpu, base, rows, slots) for rows, slots in _CASES)
        yield f"| {name} | {base / 1e3:.1f} | {' | '.join(cells)} |"


def _step_cell(gpu: GpuModel, base: float, rows: int, slots: int) -> str:
    before = after = beside = 0.0
    for group, linears in LLAMA_3_8B.groups.items():
        shape = _shape(linears, rows, slots)
        before += LAYERS * call_us(shape, _before(shape, gpu), gpu, slots=slots)
        us = call_us(shape, launches_of(shape, gpu.chip), gpu, slots=slots)
        after += LAYERS * us
        if slots > 1 and group == "qkv":  # with slots it stays before its GEMM
            beside += LAYERS * us
        else:
            taken = bytes_us(shape, gpu, slots=slots)  # from the GEMM, which waits for bytes too
            beside += LAYERS * (SIGNAL_US + taken + max(0.0, us - _gemm_us(linears, gpu)))
    return f"{before:.0f}, {after:.0f}, {beside:.0f} ({100 * beside / base:.1f} %)"


def _before(shape: GroupShape, gpu: GpuModel) -> tuple[Launch, ...]:
    """As it was planned: a pair without clusters, `fused_tiles` from 9 rows, passes in z."""
    one = replace(shape, stacks=None)
    launches = plan_launches(one, gpu.chip, aligned=gpu.chip.cluster > 1 and shape.m <= 8)
    if not shape.stacks:
        return launches
    passes = min(shape.m, SLOT_COUNT + 1)
    return tuple(
        replace(each, kernel=SLOTS + each.kernel, grid=(*each.grid[:2], passes))
        for each in launches
    )


def alone_table() -> Iterator[str]:
    """Yield rows for GPUs without clusters: a layer's four calls, in ways to launch them."""
    yield "| GPU, model | rows | two launches | one, repeated | one, with a counter | as planned |"
    yield "|---|---|---|---|---|---|"
    for name in _ALONE:
        for model, layer in _MODELS.items():
            for rows in (1, 8, 32):
                ways = zip(*(_ways(layer, g, GPUS[name], rows) for g in layer.groups), strict=True)
                cells = " | ".join(f"{sum(way):.1f}" for way in ways)
                yield f"| {name}, {model} | {rows} | {cells} |"


def _ways(layer: LayerShape, group: str, gpu: GpuModel, rows: int) -> tuple[float, ...]:
    shape = _shape(layer.groups[group], rows, 1)
    pair = call_us(shape, plan_launches(shape, gpu.chip, aligned=False), gpu)
    # A short k has the grid of the kernel; its path grows with k.
    (repeated,) = plan_launches(replace(shape, k=8), gpu.chip)
    counter = (
        pair - gpu.ceilings.node_us - (KERNEL_CYCLES - COUNTER_CYCLES) / gpu.ceilings.megahertz
    )
    planned = call_us(shape, launches_of(shape, gpu.chip), gpu)
    return pair, call_us(shape, (repeated,), gpu), counter, planned


def idle_table() -> Iterator[str]:
    """Yield a row for each GPU: what 128 nodes cost a step in which no row has an adapter."""
    yield "| GPU | base, ms | nodes, us: 1 row | 8 rows | beside the GEMMs, us |"
    yield "|---|---|---|---|---|"
    for name in _STEPS:
        gpu, groups = GPUS[name], LLAMA_3_8B.groups.values()
        base = sum(_gemm_us(linears, gpu) for linears in groups) * LAYERS
        cells = []
        for rows in (1, 8):
            shapes = [_shape(linears, rows, 1, rank=IDLE_RANK) for linears in groups]
            us = LAYERS * sum(call_us(s, launches_of(s, gpu.chip), gpu) for s in shapes)
            cells.append(f"{us:.0f} ({100 * us / base:.1f} %)")
        beside = 4 * LAYERS * SIGNAL_US
        yield (
            f"| {name} | {base / 1e3:.1f} | {' | '.join(cells)} | "
            f"{beside:.0f} ({100 * beside / base:.1f} %) |"
        )


def _shape(linears: Sequence[LinearShape], rows: int, slots: int, rank: int = RANK) -> GroupShape:
    sites = tuple(SiteShape(linear.n, rank) for linear in linears)
    stacks = StackShape(slots, len(sites), tuple(range(len(sites)))) if slots > 1 else None
    return GroupShape(rows, linears[0].k, sites, "float16", len(sites) == 1, stacks)


def _gemm_us(linears: Sequence[LinearShape], gpu: GpuModel) -> float:
    """Of the base model's product: the bytes of its weights."""
    return ITEM_BYTES * sum(each.k * each.n for each in linears) / gpu.ceilings.bytes_per_us


def main() -> None:
    """Print the tables."""
    for table in (step_table, alone_table, idle_table):
        print("\n".join(table()), end="\n\n")


if __name__ == "__main__":
    main()
