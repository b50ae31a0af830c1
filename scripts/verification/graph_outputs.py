"""Compare a graph's outputs with those of its ONNX file, the adapter merged into the weights."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trt_lora.plugins.extras import extra
from trt_lora.runtime import Engine
from trt_lora.runtime.manifest import ONNX_FILE, ONNX_WEIGHTS_FILE
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.terminal.adapters import BASE
from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.verification.deltas import engine_factors


@dataclass(frozen=True)
class OutputRow:
    """One output with the base model or the adapter."""

    output: str
    adapter: str
    largest: float  # error
    size: float  # the largest value of the reference
    change: float  # the largest that the adapter makes

    @property
    def error(self) -> float:
        """The largest error, of the largest value."""
        return self.largest / self.size if self.size else self.largest


def compared_outputs(
    engine: Engine, adapter: str, inputs: Mapping[str, Array]
) -> Iterator[OutputRow]:
    """Yield a row for every output, with the base model and with an adapter.

    The reference is the engine's graph without LoRA, whose weights are W + A @ B, on ONNX Runtime.

    Args:
        engine: it runs, and has the adapter.
        adapter: its name.
        inputs: all but LoRA's.

    Raises:
        ModelError: a weight is none that an adapter can be merged into.
        BackendError: ONNX Runtime, or the extra `export`, is not installed.
    """
    base = engine.run(inputs)
    for name in ("", adapter):
        ours = engine.run(inputs, adapter=name or None)
        for output, theirs in _merged(engine, name, inputs).items():
            largest, change = (_largest(ours[output], other) for other in (theirs, base[output]))
            yield OutputRow(output, name, largest, _largest(theirs, 0), change)


def _largest(one: Array, other: Array | float) -> float:
    """The largest difference; NaN where there is one."""
    difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    return float(np.abs(difference).max(initial=0))


def print_outputs(rows: Iterable[OutputRow]) -> None:
    """Print a table."""
    header = ("output", "adapter", "error, of the largest value", "change by the adapter")
    cells = [
        (row.output, row.adapter or BASE, f"{row.error:.1e}", f"{row.change:.1e}") for row in rows
    ]
    print_table(header, cells)


def output_problems(rows: Iterable[OutputRow], limit: float) -> list[str]:
    """Return a line for every output whose error is beyond the limit, or for an idle adapter."""
    rows = list(rows)
    problems = [
        f"{row.output} with {row.adapter or BASE} is off by {row.error:.2e} of its largest value, "
        f"beyond {limit}"
        for row in rows
        if not row.error <= limit
    ]
    if not any(row.change for row in rows):
        problems.append("the adapter changes no output, so that nothing was verified")
    return problems


def _factors(engine: Engine, name: str) -> dict[str, Array]:
    """A [k, r] and B [r, n] of every site by the engine's names; zeros where there is none."""
    found = engine_factors(engine.adapters, name) if name else {}
    factors: dict[str, Array] = {}
    for site in engine.manifest.sites:
        nothing = np.zeros((site.k, 1)), np.zeros((1, site.n))
        pair = engine.manifest.binding_names.pair(site.path)
        factors |= dict(zip(pair, found.get(site.path, nothing), strict=True))
    return factors


def _merged(engine: Engine, name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    with extra("export", "verify"):
        import onnx_ir as ir

        from trt_lora.builder.passes.merge_lora import MergeLoRA
    with extra("cpu", "verify"):
        import onnxruntime
    with TemporaryDirectory() as folder:
        model, file = ir.load(engine.directory / ONNX_FILE), Path(folder) / ONNX_FILE
        MergeLoRA(engine.manifest, _factors(engine, name), Path(folder) / "changed.data")(model)
        ir.save(model, file, external_data=ONNX_WEIGHTS_FILE)
        session = onnxruntime.InferenceSession(file)
        names = [output.name for output in session.get_outputs()]
        outputs = map(np.asarray, session.run(None, dict(inputs)))
        return dict(zip(names, outputs, strict=True))
