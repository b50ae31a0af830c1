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

import torch
from transformers.cache_utils import DynamicCache

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.generation.step_inputs import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS,
    LOGITS_TO_KEEP,
    PAST,
    POSITION_IDS,
    PRESENT,
)
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.comparison.files import load_inputs, save_outputs
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
def _forward(model: Any, step: Mapping[str, Array]) -> Any:
    cache, layer = DynamicCache(), 0
    while f"{PAST}{layer}.key" in step:
        key, value = (step[f"{PAST}{layer}.{side}"] for side in ("key", "value"))
        cache.update(torch.from_numpy(key), torch.from_numpy(value), layer)
        layer += 1
    names = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS)  # as transformers has them
    arguments = {name: torch.from_numpy(step[name]) for name in names if name in step}
    return model(**arguments, past_key_values=cache, use_cache=True)


def _outputs(model: Any, step: Mapping[str, Array]) -> dict[str, Array]:
    """Logits [batch, kept, vocab] and the cache, under the engine's names."""
    out = _forward(model, step)
    outputs = {LOGITS: out.logits[:, torch.from_numpy(step[LOGITS_TO_KEEP])].numpy()}
    for layer, content in enumerate(out.past_key_values.layers):
        outputs[f"{PRESENT}{layer}.key"] = content.keys.numpy()
        outputs[f"{PRESENT}{layer}.value"] = content.values.numpy()
    return outputs


def _sites(model: Any, paths: Sequence[str], step: Mapping[str, Array]) -> dict[str, Array]:
    """`<path>.x` and `<path>.y` of every call of every site, as `MarkSites` names."""
    tensors: dict[str, Array] = {}
    with _recording(model, paths, tensors):
        _forward(model, step)
    return tensors


@contextmanager
def _recording(model: Any, paths: Sequence[str], tensors: dict[str, Array]) -> Iterator[None]:
    modules = {n.removeprefix("base_model.model."): module for n, module in model.named_modules()}
    with ExitStack() as stack:
        for path in paths:
            handle = modules[path].register_forward_hook(partial(_record, path, tensors))
            stack.callback(handle.remove)
        yield


def _record(
    path: str, tensors: dict[str, Array], module: Any, inputs: Any, y: torch.Tensor
) -> None:
    calls = sum(name in tensors for name in (f"{path}.y", f"{path}#2.y"))
    label = path if not calls else f"{path}#{calls + 1}"
    tensors[f"{label}.x"] = inputs[0].numpy(force=True).copy()
    tensors[f"{label}.y"] = y.numpy(force=True).copy()


if __name__ == "__main__":
    main()
