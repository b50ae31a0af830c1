"""`trt-lora convert-adapter`: convert an adapter between formats."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trt_lora.plugins.contract.sites import MAGNITUDE, TRAINED_BIAS
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.dora import with_scales
from trt_lora.runtime.adapters.fitting.fit import adapter_of_engine, preview_adapter
from trt_lora.runtime.adapters.fitting.trained_biases import with_bias_differences
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import DTYPES, FORMATS, save_adapter
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.printing import print_json

_OUT = "directory to make; for onnxruntime a file, NAME.onnx_adapter"


class _OptionOfTrtllm(argparse.Action):
    """Says how to write what TensorRT-LLM's converter has options for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.error(
            f"{option_string} is of TensorRT-LLM's hf_lora_convert.py; here it is: "
            f"{parser.prog} IN OUT --format trtllm"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="directory or file; a PEFT .bin is read safely")
    add("output", type=Path, metavar="OUT", help=_OUT)
    add("--format", choices=FORMATS, required=True)
    add(
        "--dtype",
        "--storage-type",
        choices=DTYPES,
        help="of the tensors (default: as they are; edgellm: float16)",
    )
    for theirs in (("-i", "--in-file"), ("-o", "--out-dir")):
        add(*theirs, action=_OptionOfTrtllm, help=argparse.SUPPRESS)
    add(
        "--engine",
        type=Path,
        metavar="DIR",
        help="engine that the result is for: checks it, gives it the engine's names and modules; "
        "needed to read TensorRT-LLM's format, which holds no shapes, and diffusion models' files",
    )
    what = "of a diffusion pipeline that the engine is, where a file is for several: unet, ..."
    add("--component", default="", metavar="NAME", help=what)
    what = "the model that was quantised by AWQ, of which the adapter is: rescale it for --model"
    add("--adapter-base", type=Path, metavar="DIR", help=what)
    add("--model", type=Path, metavar="DIR", help="the quantised model, with --adapter-base")
    what = "base model of an adapter with DoRA or trained biases, or an engine: makes its vectors"
    add("--base", type=Path, metavar="DIR", help=what)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_convert)


def _convert(args: argparse.Namespace) -> None:
    manifest = read_manifest(args.engine) if args.engine else None
    with _readable(hub_path(args.source)) as path:
        loaded = load_adapter(path, manifest, component=args.component)
        adapter = _of_base(_of_model(loaded, args), args, manifest)
        change = save_adapter(
            adapter, args.output, args.format, dtype=args.dtype, manifest=manifest
        )
        fitted = adapter if manifest is None else preview_adapter(adapter, manifest)
        log_warnings(str(args.source), fitted.warnings)
    if args.json:
        fields = {"output": str(args.output), "source": str(args.source), "format": args.format}
        print_json(fields | {"tensors": len(adapter.weights)} | asdict(change))
        return
    print(f"{args.output}: {len(adapter.weights)} tensors from {args.source}")
    if change.rounding_error or change.flushed:
        print(f"rounded by at most {change.rounding_error:.2g}; {change.flushed} values became 0")


def _of_model(adapter: Adapter, args: argparse.Namespace) -> Adapter:
    """The adapter as it is, or rescaled for a model that AWQ has made of its base."""
    if args.adapter_base is None and args.model is None:
        return adapter
    if args.adapter_base is None or args.model is None:
        raise ConfigError(
            "--adapter-base ORIGINAL and --model QUANTISED rescale an adapter; pass both"
        )
    with extra("export", "reading a model"):
        from trt_lora.builder.checkpoint.folded_factors import rescaled
    return rescaled(adapter, hub_path(args.adapter_base), hub_path(args.model))


def _of_base(adapter: Adapter, args: argparse.Namespace, manifest: Manifest | None) -> Adapter:
    """The adapter with vectors, A and B in the place of what needs the base model's weights."""
    needing = {path for kind, path in adapter.vectors if kind in (MAGNITUDE, TRAINED_BIAS)}
    if (base := args.base or args.engine) is not None and needing:
        with extra("export", "reading a model"):
            from trt_lora.builder.dora_base import base_blocks
        blocks = base_blocks(hub_path(base))
        adapter = with_scales(adapter, blocks, adapter.ranks)
        if manifest is None:
            adapter = with_bias_differences(adapter, blocks, needing)
    return adapter if manifest is None else adapter_of_engine(adapter, manifest, args.engine)


@contextmanager
def _readable(source: Path) -> Iterator[Path]:
    """Yield the source itself, or a PEFT directory with what its `.bin` holds."""
    file = source / "adapter_model.bin" if source.is_dir() else source
    if file.suffix != ".bin" or not file.is_file() or (source / WEIGHTS_FILE).exists():
        yield source
        return
    with tempfile.TemporaryDirectory() as scratch:
        if not (file.parent / CONFIG_FILE).is_file():
            raise AdapterError(f"{file} has no {CONFIG_FILE} beside it; copy it there")
        shutil.copyfile(file.parent / CONFIG_FILE, Path(scratch, CONFIG_FILE))
        _copy_tensors(file, Path(scratch, WEIGHTS_FILE))
        yield Path(scratch)


def _copy_tensors(file: Path, output: Path) -> None:
    """Read tensors and nothing else from torch's pickle, and write them as safetensors."""
    with extra("export", f"reading {file}"):
        import torch
        from safetensors.torch import save_file
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output)
    except Exception as error:  # whatever the restricted unpickler meets in a file
        raise AdapterError(f"{file} does not hold tensors alone: {error}") from error
