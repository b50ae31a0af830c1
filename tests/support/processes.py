"""Environment of the processes that tests start."""

import os
from pathlib import Path

_NO_TORCH = Path(__file__).with_name("no_torch")


def without_torch() -> dict[str, str]:
    """Return variables with which a process finds no torch, as if it were not installed.

    polygraphy imports torch in every process, for the tensors that might be in a JSON file, where
    it finds it: a second and a half of processor time. Only bfloat16 needs it.
    """
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(_NO_TORCH), *([others] if others else [])])}
