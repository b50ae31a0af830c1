"""W2, W4 and W8: what LoRA adds to a whole step, every contestant in the same chain.

Overheads are over the base in the form that a contestant extends: with q, k and v apart for ours
(as TensorRT-RTX runs them), in one product for the others (as torch and vLLM do).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trt_lora.plugins.group import GroupShape, SiteShape
from trt_lora.plugins.launch import plan_launches
from trt_lora.scripts.gpu.adapters import LayerFactors, zero_adapter
from trt_lora.scripts.gpu.bench import Bench, Options
from trt_lora.scripts.gpu.chain import Chain, Lora, Weights
from trt_lora.scripts.gpu.contest import Contest
from trt_lora.scripts.gpu.contestants import (
    AfterBase,
    NoLora,
    Ours,
    addmm,
    native_dynamic,
    pair_add,
)
from trt_lora.scripts.gpu.peers import compiled_pair, peft, vllm
from trt_lora.scripts.gpu.results import Expectation, Expectations, Row
from trt_lora.scripts.gpu.roofline import SCHEMES, Scheme, overhead_percent
from trt_lora.scripts.gpu.shapes import ModelShape

PREFILL_LAYERS = 8  # enough to leave nothing in the cache; 32 would take seconds a replay
AGREES = 0.05  # of two ways to compute 32 layers in float16
# The targets are for this rank, and up to so many rows.
_RANK, _MOST_ROWS, _OURS, _NATIVE, _VLLM, _IDLE = 16, 32, 8.0, 25.0, 2.0, 5.0


@dataclass(frozen=True)
class Cell:
    """One row of the workload."""

    m: int
    rank: int

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"m{self.m} r{self.rank}"


# Those of one rank together: an adapter is made once.
DECODE = tuple(Cell(m, rank) for rank in (16, 64, 256, 8) for m in (1, 8, 32, 64))
PREFILL = tuple(Cell(m, rank) for rank in (16, 64) for m in (512, 2048, 4096))
COMPILED = Cell(8, 16)
IDLE_ROWS = (1, 32)


def decode_expectations(options: Options) -> Expectations:
    """Return what section 3d of performance.md says, with the launches that are made here."""
    return {cell.name: _decode(cell, options) for cell in DECODE}


def prefill_expectations(options: Options) -> Expectations:
    """Return the same for fewer layers; the target is parity with addmm_."""
    fewer = replace(options, model=replace(options.model, layers=PREFILL_LAYERS))
    parity = {"addmm / ours": Expectation(at_least=1.0)}
    return {cell.name: _overheads(cell, fewer) | parity for cell in PREFILL}


def idle_expectations(options: Options) -> Expectations:
    """Return what an engine pays without an adapter: its launches, and the passes over y."""

    def expected(m: int) -> Mapping[str, Expectation]:
        overhead = overhead_percent(m, 1, _planned("ours", Cell(m, 1), options), options.model)
        return {
            "idle overhead, %": Expectation(*overhead, at_most=_IDLE),
            "idle / base, difference": Expectation(at_most=0.0),
        }

    return {f"m{m}": expected(m) for m in IDLE_ROWS}


def compiled_expectations(options: Options) -> Expectations:
    """Return the one row of torch.compile."""
    predicted = overhead_percent(COMPILED.m, COMPILED.rank, SCHEMES["compiled_pair"], options.model)
    agreement = {"compiled_pair / addmm, difference": Expectation(at_most=AGREES)}
    overhead = {"compiled_pair overhead, %": Expectation(*predicted)}
    return {COMPILED.name: overhead | agreement}


def decode_rows(bench: Bench) -> Iterator[Row]:
    """Measure W2."""
    for cell in DECODE:
        yield measure(bench, bench.weights, cell)


def prefill_rows(bench: Bench) -> Iterator[Row]:
    """Measure W4, on the first layers of the same weights."""
    for cell in PREFILL:
        yield measure(bench, first_layers(bench.weights, PREFILL_LAYERS), cell)


def idle_rows(bench: Bench) -> Iterator[Row]:
    """Measure W8: rank-1 zeros at every linear, as the runtime binds them without an adapter."""
    device, model = bench.device, bench.model
    zeros = zero_adapter(device, model.groups, model.layers)
    published = {"with no adapter, elsewhere": "23 % (SGLang PR 22809)"}
    for m in IDLE_ROWS:
        contest = Contest(bench, Chain(device, model, bench.weights, m))
        contest.add("base", NoLora())
        contest.add("merged", NoLora())
        contest.add("idle", Ours(device, model, zeros, m), "base")
        contest.add("idle_one_stream", Ours(device, model, zeros, m, beside=False), "base")
        sizes = {"m": m, "layers": model.layers}
        yield contest.row(f"m{m}", sizes, reference="base", notes=published)


def compiled_rows(bench: Bench) -> Iterator[Row]:
    """Measure what torch.compile makes of the pair; compiling takes most of a minute."""
    model, adapter = bench.model, bench.adapter(COMPILED.rank)
    contest = Contest(bench, Chain(bench.device, model, bench.weights, COMPILED.m))
    contest.add("base", NoLora())
    contest.add("base_merged", NoLora(merges_qkv=True))
    contest.add("addmm", AfterBase(addmm(adapter.ours)), "base_merged")
    contest.add("ours", Ours(bench.device, model, adapter.ours, COMPILED.m), "base")
    pair = compiled_pair(model.groups, adapter.ours)
    contest.add("compiled_pair", AfterBase(pair), "base_merged")
    yield contest.row(COMPILED.name, _sizes(COMPILED, model), reference="addmm")


def measure(bench: Bench, weights: Weights, cell: Cell) -> Row:
    """Time every contestant in one step."""
    device, m = bench.device, cell.m
    model = replace(bench.model, layers=len(weights.layers))
    adapter = bench.adapter(cell.rank)
    ours, turned = adapter.ours[: model.layers], adapter.turned[: model.layers]
    contest = Contest(bench, Chain(device, model, weights, m))
    contest.add("base", NoLora())
    contest.add("merged", NoLora())  # the same again: a merge changes the numbers alone
    contest.add("base_merged", NoLora(merges_qkv=True))
    contest.add("ours", Ours(device, model, ours, m), "base")
    contest.add("ours_one_stream", Ours(device, model, ours, m, beside=False), "base")
    for name, adder in (
        ("addmm", addmm(ours)),
        ("pair_add", pair_add(ours)),
        ("native_dynamic", native_dynamic(device, ours)),
    ):
        contest.add(name, AfterBase(adder), "base_merged")
    contest.attempt("peft", lambda: AfterBase(peft(device, model.groups, turned)), "base_merged")
    contest.attempt("vllm", lambda: _vllm(bench, model, turned, m), "base_merged")
    return contest.row(cell.name, _sizes(cell, model), reference="addmm")


def _vllm(bench: Bench, model: ModelShape, turned: Sequence[LayerFactors], m: int) -> Lora:
    return AfterBase(vllm(bench.device, model.groups, turned, bench.vllm(), m))


def first_layers(weights: Weights, layers: int) -> Weights:
    """Return the weights of a model with fewer layers."""
    return replace(weights, layers=weights.layers[:layers])


def _sizes(cell: Cell, model: ModelShape) -> dict[str, int]:
    return {"m": cell.m, "rank": cell.rank, "layers": model.layers}


def _decode(cell: Cell, options: Options) -> Mapping[str, Expectation]:
    expected = _overheads(cell, options)
    if cell.rank == _RANK and cell.m <= _MOST_ROWS:
        ours, native = (f"{name} overhead, %" for name in ("ours", "native_dynamic"))
        expected[ours] = replace(expected[ours], at_most=_OURS)
        expected[native] = replace(expected[native], at_least=_NATIVE)
        expected["vllm overhead / ours overhead"] = Expectation(at_least=_VLLM)
    return expected


def _overheads(cell: Cell, options: Options) -> dict[str, Expectation]:
    names = ("ours", "ours_one_stream", "addmm", "pair_add", "native_dynamic", "peft", "vllm")
    expected = {
        f"{name} overhead, %": Expectation(
            *overhead_percent(cell.m, cell.rank, _planned(name, cell, options), options.model)
        )
        for name in names
    }
    compared = (name for name in names if name != "addmm")
    agreement = Expectation(at_most=AGREES)
    return expected | {f"{name} / addmm, difference": agreement for name in compared}


def _planned(name: str, cell: Cell, options: Options) -> Scheme:
    """The scheme; ours with the launches that the launcher plans for these sizes."""
    scheme = SCHEMES[name]
    if not name.startswith("ours"):
        return scheme
    groups = dict(options.model.groups)
    if name == "ours":
        del groups["gate_up"]  # beside the base's product
    launches = 0
    for group in groups.values():
        sites = tuple(SiteShape(linear.n, cell.rank) for linear in group)
        shape = GroupShape(cell.m, group[0].k, sites, "float16", True)
        launches += len(plan_launches(shape, options.chip))
    return replace(scheme, nodes=launches)
