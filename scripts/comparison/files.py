"""Input, output and accuracy files of polygraphy."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.memory.dtypes import Array

Steps = Sequence[Mapping[str, Array]]  # the outputs of every step

STEPS = ("prefill", "decode")


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep polygraphy's log of files out of stdout, where only the answer belongs."""
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.WARNING):
        yield


def _save(content: Any, path: Path) -> None:
    from polygraphy.json import save_json

    path.parent.mkdir(parents=True, exist_ok=True)
    with _quietly():
        save_json(content, str(path))


def _load(path: Path) -> Any:
    from polygraphy.json import load_json

    with _quietly():
        return load_json(str(path))


def save_inputs(steps: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Write one file per step, as `--load-inputs FOLDER` reads them."""
    for number, step in enumerate(steps):
        _save(dict(step), folder / f"{number:010}.json")


def load_inputs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps that `save_inputs` wrote; the LoRA inputs are the same in all."""
    yield from map(_load, sorted(folder.glob("*.json")))


def load_outputs(path: Path) -> list[dict[str, Array]]:
    """Return the outputs of every step of the only runner in a file of `--save-outputs`."""
    ((_, steps),) = _load(path).items()
    return [dict(step.items()) for step in steps]


@dataclass(frozen=True)
class OutputDifference:
    """Error of one output of one step against the reference; NaN where shapes differ."""

    name: str
    step: int
    largest: float
    mean: float
    within: bool


@dataclass(frozen=True)
class Accuracy:
    """One comparison by polygraphy: the names of both runners, and every output of every step."""

    runners: tuple[str, str]
    errors: list[OutputDifference]


def same_outputs(ones: Steps, others: Steps) -> bool:
    """Return whether two files of outputs hold the same values."""
    return all(
        np.array_equal(one[name], other[name])
        for one, other in zip(ones, others, strict=True)
        for name in one
    )


def check_complete(accuracy: Accuracy, outputs: Collection[str]) -> None:
    """Check that all outputs of both steps were compared; polygraphy passes over missing ones.

    Raises:
        BackendError: one was not.
    """
    compared = {(error.name, error.step) for error in accuracy.errors}
    lost = [f"{name} ({kind})" for step, kind in enumerate(STEPS) for name in outputs
            if (name, step) not in compared]  # fmt: skip
    if lost:
        raise BackendError(
            f"{len(lost)} of {len(STEPS) * len(outputs)} outputs were not compared: "
            f"{listed(lost)}; {' and '.join(accuracy.runners)} returned different ones"
        )


def load_accuracy(path: Path) -> Accuracy:
    """Return what `--save-accuracy-results` wrote, in the order of steps and outputs."""
    (result,) = _load(path)
    ((runners, steps),) = result.items()
    errors = [
        _error(name, number, compared)
        for number, step in enumerate(steps)
        for name, compared in step.items()
    ]
    return Accuracy(runners, errors)


def _error(name: str, step: int, compared: Any) -> OutputDifference:
    if isinstance(compared, bool):  # it compares nothing where shapes differ
        return OutputDifference(name, step, np.nan, np.nan, compared)
    return OutputDifference(name, step, compared.max_absdiff, compared.mean_absdiff, bool(compared))
