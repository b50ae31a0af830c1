"""`trt-lora merge`: merge one adapter into its base model, for `build-engine --model`.

For adapters that are no product beside a linear, which an engine cannot switch: DoRA, biases,
whole modules, token embeddings. PEFT merges; the result is a transformers directory.
"""

import argparse
import os
from pathlib import Path

from trt_lora.builder.config import DTYPES
from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.printing import print_json
from trt_lora.scripts.terminal.stage_progress import stage_progress


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the base model, or org/name")
    add("--adapter", type=Path, required=True, metavar="PATH", help="a PEFT directory, or org/name")
    add("output", type=Path, metavar="OUT", help="directory to make")
    add("--dtype", choices=DTYPES, help="of the merged weights (default: the checkpoint's)")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_merge)


def _merge(args: argparse.Namespace) -> None:
    output: Path = args.output
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; choose another place")
    model, adapter = hub_path(args.model), hub_path(args.adapter)
    if not (adapter / CONFIG_FILE).is_file():
        raise AdapterError(
            f"{adapter} has no {CONFIG_FILE}: it is not a PEFT adapter directory; convert it with: "
            f"trt-lora convert-adapter {adapter} OUT --format peft"
        )
    with extra("peft", "merging an adapter"):
        from trt_lora.builder.checkpoint.merged_model import merge_adapter

    with stage_progress() as progress, publish_directory(output, lambda _: False) as work:
        dtype = merge_adapter(model, adapter, work, args.dtype, progress)
        size = sum(path.stat().st_size for path in work.iterdir())
    if args.json:
        fields = {"output": str(output), "model": str(model), "adapter": str(adapter)}
        print_json(fields | {"dtype": dtype, "size_bytes": size})
    else:
        print(f"{output}: {adapter} merged into {model}, {dtype}, {size / 1e6:.0f} MB")
        print(
            f"build an engine with: build-engine --model {output} --lora-target-modules all-linear"
        )
