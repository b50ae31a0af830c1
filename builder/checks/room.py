"""Check the free space where an engine is to be, before anything is exported."""

import shutil
from pathlib import Path

from trt_lora.builder.config import BuildConfig
from trt_lora.plugins.errors import ConfigError


def check_room(config: BuildConfig, weight_bytes: int, has_plan: bool) -> None:
    """Refuse a build whose weights alone would not fit beside its output.

    What stands at the output is replaced in the end, so both are there for a while. The graph, the
    plan's kernels and the tokenizer are not counted.

    Args:
        config: the options.
        weight_bytes: of the model in the engine's dtype.
        has_plan: whether a plan is made, which has the weights once more.

    Raises:
        ConfigError: there is less room.
    """
    needed, free = weight_bytes * (2 if has_plan else 1), _free_bytes(config.output)
    if free < needed:
        plan = " and a plan of them" if has_plan else ""
        cures = ["make room", "choose another --output"]
        cures += ["pass --dtype float16"] if config.dtype == "float32" else []
        cures += ["pass --flavour none"] if has_plan else []
        raise ConfigError(
            f"{config.output} takes at least {needed / 1e6:.1f} MB (weights in {config.dtype}"
            f"{plan}), {free / 1e6:.1f} MB are free there; {', '.join(cures[:-1])} or {cures[-1]}"
        )


def _free_bytes(output: Path) -> int:
    """Bytes that are free on the file system of a path, of which the end may not be there yet."""
    there = next((path for path in (output, *output.absolute().parents) if path.is_dir()), output)
    return shutil.disk_usage(there).free
