"""Find the first LoRA site whose tensors differ from a reference's.

Sites are looked at in the order of the graph, in which a site comes after all that it reads: those
before the first that differs are right, those after it may differ as a consequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.sites import FACTORS
from trt_lora.runtime.adapters.fitting.coverage import SiteCoverage
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

Steps = Sequence[dict[str, Array]]  # of every step: tensors as `MarkSites` names them

_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class SiteFault:
    """The first site that differs; errors are relative, |engine - reference| / |reference|."""

    path: str
    rank: int  # of the adapter; 1 for a dummy
    scales: tuple[float, ...]  # folded into B; empty for a dummy
    shapes: dict[str, tuple[int, ...]]  # of A and B
    input_error: float
    output_error: float  # of linear, bias and delta
    delta_error: float | None  # of the delta alone, where both sides show it
    cause: str

    def text(self) -> str:
        """Return it as a sentence or two."""
        shapes = ", ".join(f"{factor} {list(shape)}" for factor, shape in self.shapes.items())
        scale = " and ".join(f"{scale:.6g}" for scale in self.scales) or "none"
        delta = "" if self.delta_error is None else f", delta {self.delta_error:.1e}"
        return (
            f"{self.path} (rank {self.rank}, scale {scale}, {shapes}): {self.cause}. Relative "
            f"errors: input {self.input_error:.1e}, output {self.output_error:.1e}{delta}"
        )


def first_fault(
    engine: Steps, reference: Steps, manifest: Manifest, sites: Sequence[SiteCoverage], limit: float
) -> SiteFault | None:
    """Return the first site, in the order of `engine`, that is off by more than `limit`.

    Args:
        engine: the tensors of the engine's sites, with deltas.
        reference: those of the reference; deltas are compared where it has them.
        manifest: of the engine.
        sites: what the adapter does to the engine's sites; empty for the base model.
        limit: of the relative error. What rounding adds where the graph adds a residual or a
            linear in one step with the delta is allowed beyond it.
    """
    labels = [name.removesuffix(".y") for name in engine[0] if name.endswith(".y")]
    before = ""
    for label in labels:
        errors = _Errors(engine, reference, label, _EPSILON[manifest.dtype])
        if cause := errors.cause(limit, before):
            return _fault(label, errors, cause, engine, manifest, sites)
        before = label
    return None


@dataclass(frozen=True)
class _Errors:
    engine: Steps
    reference: Steps
    label: str
    epsilon: float  # of the engine's dtype

    def cause(self, limit: float, before: str) -> str:
        """Return the cause of a difference here; empty if there is none."""
        if f"{self.label}.y" not in self.reference[0]:
            return "the reference has no such site"
        output, delta = self.exceeds("y", limit), self.exceeds("delta", limit)
        if self.exceeds("x", limit):
            place = f"after {before}" if before else "before every site"
            return f"what it reads differs already, so the fault lies {place}, in no LoRA site"
        if delta:
            return "its delta differs"
        if output:
            compared = self.relative("delta") is not None
            return (
                "its delta agrees, its linear or bias differs" if compared else "its delta differs"
            )
        return ""

    def relative(self, kind: str) -> float | None:
        """|engine - reference| / |reference| over all steps; None if one side lacks the tensor."""
        if (norms := self._norms(kind)) is None:
            return None
        difference, size = norms
        return difference / size if size else (float("inf") if difference else 0.0)

    def exceeds(self, kind: str, limit: float) -> bool:
        """Return whether the difference is more than the limit and rounding explain."""
        norms = self._norms(kind)
        return norms is not None and not norms[0] <= limit * norms[1] + self._rounding(kind)

    def _rounding(self, kind: str) -> float:
        """Rounding error of the tensors from which y and delta were subtracted."""
        if kind == "x":
            return 0.0
        added = [_norm(_all(self.engine, f"{self.label}.{other}")) for other in ("y", "residual")]
        return 2 * self.epsilon * sum(added)

    def _norms(self, kind: str) -> tuple[float, float] | None:
        name = f"{self.label}.{kind}"
        if name not in self.engine[0] or name not in self.reference[0]:
            return None
        ours, theirs = _all(self.engine, name), _all(self.reference, name)
        if ours.shape != theirs.shape:
            return float("inf"), _norm(theirs)
        return _norm(ours - theirs), _norm(theirs)


def _all(steps: Steps, name: str) -> npt.NDArray[np.float64]:
    """The tensors of all steps in a row; nothing where there are none."""
    values = [np.asarray(step[name], np.float64).ravel() for step in steps if name in step]
    return np.concatenate(values) if values else np.zeros(0)


def _norm(values: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values))


def _fault(
    label: str,
    errors: _Errors,
    cause: str,
    engine: Steps,
    manifest: Manifest,
    sites: Sequence[SiteCoverage],
) -> SiteFault:
    path = label.partition("#")[0]
    site = next(site for site in manifest.sites if site.path == path)
    covered = next((item for item in sites if item.path == path and item.rank), None)
    rank = covered.rank if covered else 1
    return SiteFault(
        path,
        rank,
        covered.scales if covered else (),
        {factor: site.shape(factor, rank) for factor in FACTORS},
        errors.relative("x") or 0.0,
        errors.relative("y") or 0.0,
        errors.relative("delta"),
        cause,
    )
