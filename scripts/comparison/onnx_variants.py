"""Write a variant of an engine's ONNX file, as a reference for `trt-lora compare`.

    python -m trt_lora.scripts.comparison.onnx_variants engine|float64|merged ENGINE [--sites]
        [--inputs FOLDER] --output FILE.onnx

`engine` is the file as it is, `float64` computes its LoRA nodes in float64, `merged` has the LoRA
inputs of FOLDER in its weights; all take a static cache of any length. `--sites` makes what every
site reads and returns an output.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.float64_lora import EvaluateInFloat64
from trt_lora.builder.passes.free_cache_length import FreeCacheLength
from trt_lora.builder.passes.mark_sites import MarkSites
from trt_lora.builder.passes.merge_lora import MergeLoRA
from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import ONNX_FILE, read_manifest
from trt_lora.scripts.comparison.files import load_inputs
from trt_lora.scripts.terminal.console import run

KINDS = ("engine", "float64", "merged")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("engine", type=Path, help="an engine directory; nothing in it is changed")
    parser.add_argument("--output", type=Path, required=True, help="the .onnx file to write")
    parser.add_argument("--inputs", type=Path, help="folder with polygraphy's inputs; for merged")
    parser.add_argument("--sites", action="store_true", help="mark every site's tensors")
    args = parser.parse_args(argv)
    run(lambda: write_model(args.kind, args.engine, args.output, args.inputs, sites=args.sites))


def write_model(
    kind: str, engine: Path, output: Path, inputs: Path | None = None, *, sites: bool = False
) -> None:
    """Write a variant of `engine` to the file `output`.

    Its folder gets one copy of the engine's weights, for all variants in it: ONNX Runtime refuses
    weights that lie elsewhere, and symbolic links to them; onnx_ir refuses hard ones.

    Raises:
        ConfigError: `kind` is merged and `inputs` is missing.
        ManifestError: `engine` is no engine directory.
        ModelError: its graph is not as the insertion pass leaves it.
    """
    manifest = read_manifest(engine)
    model = ir.load(engine / ONNX_FILE)
    output.parent.mkdir(parents=True, exist_ok=True)
    FreeCacheLength()(model)
    if sites:
        MarkSites(deltas=kind != "merged")(model)
    if kind == "merged":
        if inputs is None:
            raise ConfigError("merged needs --inputs, the folder that holds the adapter's tensors")
        weights = output.with_suffix(".data")
        MergeLoRA(manifest, next(load_inputs(inputs)), weights)(model)
    elif kind == "float64":
        EvaluateInFloat64()(model)
    ir.save(model, output)
    for name in _weight_files(model) - {output.with_suffix(".data").name}:
        if not (output.parent / name).exists():  # an earlier variant brings them too
            with publish_file(output.parent / name) as temporary:
                shutil.copyfile(engine / name, temporary)


def _weight_files(model: ir.Model) -> set[str]:
    """The files beside a model that its weights lie in."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


if __name__ == "__main__":
    main()
