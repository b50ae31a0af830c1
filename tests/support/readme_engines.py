"""Build the README's engines by its own commands, in one process that traces their model once.

The first has a plan where TensorRT-RTX is installed; those of the others would take a minute each.
"""

import shlex

from support.doc_blocks import build_blocks
from support.models.quick_build import shared_traces

from trt_lora.scripts.build_engine import main


def build_engines(*names: str) -> None:
    """Run the commands that build these engines, in the current folder."""
    blocks = build_blocks()
    with shared_traces():
        for name in names:
            flavour = () if name == next(iter(blocks)) else ("--flavour", "none")
            command, *arguments = shlex.split(blocks[name].text.replace("\\\n", " "))
            assert command == "build-engine"
            main([*arguments, *flavour])
