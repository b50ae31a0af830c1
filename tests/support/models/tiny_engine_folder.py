"""Build the tiny engine into a folder: python -m support.models.tiny_engine_folder FOLDER.

Tests in an environment that cannot build it get the folder by `--tiny-engine`.
"""

import sys
from pathlib import Path

from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config


def build_tiny_engine(folder: Path) -> None:
    """Write a random Llama, two engines of it without a plan, and one adapter of rank 4."""
    model = save_model("Llama", folder / "model")
    save_adapter(model, folder / "a", r=4, target_modules=["q_proj", "v_proj"])
    targets = ("attn_q", "attn_v")
    quick_build(tiny_config(model, folder / "engine", target_modules=targets))
    slots = {"target_modules": targets, "max_loras": 2, "max_batch_size": 4}
    quick_build(tiny_config(model, folder / "slots", **slots))


if __name__ == "__main__":
    build_tiny_engine(Path(sys.argv[1]))
