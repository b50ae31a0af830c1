"""Run transformers and PEFT on an engine's inputs; write its outputs for polygraphy.

    python -m trt_lora.scripts.comparison.peft_outputs MODEL INPUTS --dtype DTYPE [--adapter PATH]
        [--sites ENGINE] --output FILE.json

The tokens, positions, mask and cache are those of the inputs; the LoRA inputs are not read.
`--sites` writes what every site of the engine reads and returns instead.
"""

import argparse
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.generation.decoding.static_inputs import LENGTHS
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.comparison.files import load_inputs, save_outputs
from trt_lora.scripts.comparison.peft_step import Step, step_outputs
from trt_lora.scripts.terminal.console import run
from trt_lora.scripts.verification.peft_reference import PeftReference

_NAME = "adapter"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="what the engine was made from")
    parser.add_argument("inputs", type=Path, help="folder with polygraphy's inputs")
    parser.add_argument("--dtype", required=True, help="of weights and activations")
    parser.add_argument("--adapter", type=Path, help="a PEFT directory")
    parser.add_argument("--sites", type=Path, metavar="ENGINE", help="mark every site's tensors")
    parser.add_argument("--output", type=Path, required=True, help="the .json file to write")
    args = parser.parse_args(argv)
    run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    model = _load(args.model, args.adapter, args.dtype)
    compute = partial(_outputs, model)
    if args.sites is not None:
        paths = [site.path for site in read_manifest(args.sites).sites]
        compute = partial(_sites, model, paths)
    save_outputs(map(compute, load_inputs(args.inputs)), _runner(args.dtype), args.output)


def _runner(dtype: str) -> str:
    tools = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft"))
    return f"{' + '.join(tools)} (CPU, {dtype})"


def _load(model: Path, adapter: Path | None, dtype: str) -> Any:
    try:
        return PeftReference(model, {_NAME: adapter} if adapter else {}, dtype).model
    except (ValueError, RuntimeError, OSError) as error:
        raise AdapterError(f"PEFT cannot load {adapter} on {model}: {error}") from error


@torch.inference_mode()
def _outputs(model: Any, step: Step) -> dict[str, Array]:
    """Logits and cache, under the engine's names."""
    return step_outputs(model, step)


@torch.inference_mode()
def _sites(model: Any, paths: Sequence[str], step: Step) -> dict[str, Array]:
    """`<path>.x` and `<path>.y` of every call of every site, as `MarkSites` names.

    Where rows run one after the other, each site has one call a row.
    """
    calls: dict[str, list[Array]] = {}
    with _recording(model, paths, calls):
        step_outputs(model, step)
    rows = len(step[LENGTHS]) if LENGTHS in step else 1
    return dict(_joined(calls, rows))


def _joined(calls: Mapping[str, Sequence[Array]], rows: int) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of every call with its rows together, [batch, s, width]."""
    for name, arrays in calls.items():
        path, _, kind = name.rpartition(".")
        per_row = len(arrays) // rows
        for call in range(per_row):
            label = path if not call else f"{path}#{call + 1}"
            yield f"{label}.{kind}", np.concatenate(arrays[call::per_row])


@contextmanager
def _recording(model: Any, paths: Sequence[str], calls: dict[str, list[Array]]) -> Iterator[None]:
    modules = {n.removeprefix("base_model.model."): module for n, module in model.named_modules()}
    with ExitStack() as stack:
        for path in paths:
            handle = modules[path].register_forward_hook(partial(_record, path, calls))
            stack.callback(handle.remove)
        yield


def _record(
    path: str, calls: dict[str, list[Array]], module: Any, inputs: Any, y: torch.Tensor
) -> None:
    del module  # the signature is torch's
    for kind, tensor in (("x", inputs[0]), ("y", y)):
        calls.setdefault(f"{path}.{kind}", []).append(tensor.numpy(force=True).copy())


if __name__ == "__main__":
    main()
