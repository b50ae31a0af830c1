"""Decode, prefill and idle steps: cost of each LoRA method in a whole step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import plan_launches
from trt_lora.scripts.bench.gpu.layers.decoder_layers import DecoderLayers, Lora, Weights
from trt_lora.scripts.bench.gpu.layers.lora_methods import (
    AddToOutput,
    TrtLoraKernels,
    addmm,
    adds_to_residual,
    native_dynamic,
    no_lora,
    pair_add,
)
from trt_lora.scripts.bench.gpu.layers.peer_methods import compiled_pair, peft, vllm
from trt_lora.scripts.bench.gpu.layers.random_adapters import LayerFactors, zero_adapter
from trt_lora.scripts.bench.gpu.model_shapes import ModelShape
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import LAUNCH_COSTS, LaunchCost, overhead_percent
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.workloads.method_timing import MethodTiming

PREFILL_LAYERS = 8  # enough to leave nothing in the cache; 32 would take seconds a replay
AGREES = 0.05  # of two ways to compute 32 layers in float16
# The targets are for this rank, and up to so many rows.
_RANK, _MOST_ROWS, _OURS, _NATIVE, _VLLM, _IDLE = 16, 32, 8.0, 25.0, 2.0, 5.0
_OTHERS = ("addmm", "pair_add", "native_dynamic", "peft", "vllm")

# Streams of our kernels. `ours` is what the plan does: by TensorRT-RTX 1.7.1's own list for these
# sizes, every LoRA node of a decode step lies on the one stream of the others (the builder sets no
# `max_aux_streams`); in prefill each lies on a second one, beside its group's product.
STREAMS: Mapping[str, int] = {"ours": 1, "ours_two_streams": 2}


@dataclass(frozen=True)
class StepCell:
    """One row of the workload."""

    m: int
    rank: int

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"m{self.m} r{self.rank}"


# What is wanted most comes first; those of one rank together, for an adapter is made once.
FIRST = (StepCell(1, 16), StepCell(8, 16))
DECODE = tuple(
    cell
    for cell in (StepCell(m, rank) for rank in (16, 64, 256, 8) for m in (1, 8, 32, 64))
    if cell not in FIRST
)
PREFILL = tuple(StepCell(m, rank) for rank in (16, 64) for m in (512, 2048, 4096))
COMPILED = StepCell(8, 16)
IDLE_ROWS = (1, 32)


def decode_expectations(options: Options, cells: Sequence[StepCell]) -> Expectations:
    """Return what docs/benchmarks/gpu.md predicts, with the launches that are made here."""
    return {cell.name: _decode(cell, options) for cell in cells}


def prefill_expectations(options: Options) -> Expectations:
    """Return the same for fewer layers; the target is parity with addmm_."""
    fewer = replace(options, model=replace(options.model, layers=PREFILL_LAYERS))
    parity = {"addmm / ours": Expectation(at_least=1.0)}
    return {cell.name: _overheads(cell, fewer) | parity for cell in PREFILL}


def idle_expectations(options: Options) -> Expectations:
    """Return what an engine pays without an adapter: its launches, and the passes over y."""

    def expected(m: int) -> Mapping[str, Expectation]:
        overhead = overhead_percent(
            m, 1, _planned(STREAMS["ours"], StepCell(m, 1), options), options.model
        )
        return {
            "ours overhead, %": Expectation(*overhead, at_most=_IDLE),
            "ours / base, difference": Expectation(at_most=0.0),
        }

    return {f"m{m}": expected(m) for m in IDLE_ROWS}


def compiled_expectations(options: Options) -> Expectations:
    """Return the one row of torch.compile."""
    cost = LAUNCH_COSTS["compiled_pair"]
    predicted = overhead_percent(COMPILED.m, COMPILED.rank, cost, options.model)
    agreement = {"compiled_pair / addmm, difference": Expectation(at_most=AGREES)}
    overhead = {"compiled_pair overhead, %": Expectation(*predicted)}
    return {COMPILED.name: overhead | agreement}


def decode_rows(bench: Bench, cells: Sequence[StepCell]) -> Iterator[ResultRow]:
    """Measure decode steps of all layers."""
    for cell in cells:
        yield measure(bench, bench.weights, cell)


def prefill_rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure prefill, on the first layers of the same weights."""
    for cell in PREFILL:
        yield measure(bench, first_layers(bench.weights, PREFILL_LAYERS), cell)


def idle_rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure rank-1 zeros at every linear, as the runtime binds them without an adapter."""
    device, model = bench.device, bench.model
    zeros = zero_adapter(device, model.groups, model.layers)
    published = {"with no adapter, elsewhere": "23 % (SGLang PR 22809)"}
    for m in IDLE_ROWS:
        timing = _with_bases(bench, model, bench.weights, m)
        for name, streams in STREAMS.items():
            timing.add(name, TrtLoraKernels(device, model, zeros, m, streams=streams))
        sizes = {"m": m, "layers": model.layers}
        yield timing.row(f"m{m}", sizes, reference="base", notes=published)


def compiled_rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure what torch.compile makes of the pair; compiling takes most of a minute."""
    model, adapter, m = bench.model, bench.adapter(COMPILED.rank), COMPILED.m
    timing = _with_bases(bench, model, bench.weights, m)
    timing.add("addmm", AddToOutput(addmm(adapter.ours)))
    ours = TrtLoraKernels(bench.device, model, adapter.ours, m, streams=STREAMS["ours"])
    timing.add("ours", ours)
    timing.add("compiled_pair", AddToOutput(compiled_pair(model.groups, adapter.ours)))
    yield timing.row(COMPILED.name, _sizes(COMPILED, model), reference="addmm")


def measure(bench: Bench, weights: Weights, cell: StepCell) -> ResultRow:
    """Time every method in one step."""
    device, m = bench.device, cell.m
    model = replace(bench.model, layers=len(weights.layers))
    adapter = bench.adapter(cell.rank)
    ours, theirs = adapter.ours[: model.layers], adapter.transposed[: model.layers]
    timing = _with_bases(bench, model, weights, m)
    for name, streams in STREAMS.items():
        timing.add(name, TrtLoraKernels(device, model, ours, m, streams=streams))
    timing.add("addmm", AddToOutput(addmm(ours)))
    timing.add("pair_add", AddToOutput(pair_add(ours)))
    timing.add("native_dynamic", AddToOutput(native_dynamic(device, ours)))
    timing.attempt("peft", lambda: AddToOutput(peft(device, model.groups, theirs)))
    timing.attempt("vllm", lambda: _vllm(bench, model, theirs, m))
    return timing.row(cell.name, _sizes(cell, model), reference="addmm")


def _with_bases(bench: Bench, model: ModelShape, weights: Weights, m: int) -> MethodTiming:
    timing = MethodTiming(bench, DecoderLayers(bench.device, model, weights, m))
    timing.add("base", no_lora(model))
    timing.add("merged", no_lora(model))  # the same again: a merge changes the numbers alone
    return timing


def _vllm(bench: Bench, model: ModelShape, adapter: Sequence[LayerFactors], m: int) -> Lora:
    return AddToOutput(vllm(bench.device, model.groups, adapter, bench.vllm(), m))


def first_layers(weights: Weights, layers: int) -> Weights:
    """Return the weights of a model with fewer layers."""
    return replace(weights, layers=weights.layers[:layers])


def _sizes(cell: StepCell, model: ModelShape) -> dict[str, int]:
    return {"m": cell.m, "rank": cell.rank, "layers": model.layers}


def _decode(cell: StepCell, options: Options) -> Mapping[str, Expectation]:
    expected = _overheads(cell, options)
    if cell.rank == _RANK and cell.m <= _MOST_ROWS:
        ours, native = (f"{name} overhead, %" for name in ("ours", "native_dynamic"))
        expected[ours] = replace(expected[ours], at_most=_OURS)
        expected[native] = replace(expected[native], at_least=_NATIVE)
        expected["vllm overhead / ours overhead"] = Expectation(at_least=_VLLM)
    return expected


def _overheads(cell: StepCell, options: Options) -> dict[str, Expectation]:
    costs = {name: _planned(streams, cell, options) for name, streams in STREAMS.items()} | {
        name: LAUNCH_COSTS[name] for name in _OTHERS
    }
    expected = {
        f"{name} overhead, %": Expectation(
            *overhead_percent(cell.m, cell.rank, cost, options.model)
        )
        for name, cost in costs.items()
    }
    agreement = Expectation(at_most=AGREES)
    return expected | {
        f"{name} / addmm, difference": agreement for name in costs if name != "addmm"
    }


def _planned(streams: int, cell: StepCell, options: Options) -> LaunchCost:
    """Cost of our kernels, with the launches that the launcher plans for these sizes."""
    launches = 0
    for name, group in options.model.groups.items():
        sites = tuple(SiteShape(linear.n, cell.rank) for linear in group)
        shape = GroupShape(cell.m, group[0].k, sites, "float16", adds_to_residual(name))
        launches += len(plan_launches(shape, options.chip))
    hidden = launches if streams > 1 else 0
    return replace(LAUNCH_COSTS["ours"], nodes=launches, hidden=hidden)
