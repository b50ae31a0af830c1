"""Environment of the processes that tests start."""

import os
from pathlib import Path

_NO_TORCH = Path(__file__).with_name("no_torch")


def without_torch() -> dict[str, str]:
    """Return variables with which a process finds no torch, as if it were not installed.

    polygraphy imports torch in every process, for the tensors that might be in a JSON file, where
    it finds it: a second and a half of processor time. Only bfloat16 needs it.
    """
    return first_on_path(_NO_TORCH)


def first_on_path(folder: Path) -> dict[str, str]:
    """Return variables with which a process imports what is in `folder` before anything else."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}" if others else str(folder)}
