"""An engine that pads ranks, as one with our plugin does."""

import json
from pathlib import Path


def with_padding_plan(engine: Path, copy: Path) -> Path:
    """A copy of an engine whose manifest says that a plan with our plugin is there."""
    copy.mkdir()
    fields = json.loads((engine / "manifest.json").read_text())
    fields |= {"flavour": "tensorrt-rtx", "lora_plugin": "plugin"}
    (copy / "manifest.json").write_text(json.dumps(fields))
    for name in fields["files"]:
        (copy / name).symlink_to(engine / name)
    return copy
