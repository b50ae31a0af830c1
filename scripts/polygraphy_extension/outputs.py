"""Compared outputs and tolerances of `polygraphy run` with LoRA options.

With the float64 reference and without TensorRT, the output of every LoRA node is compared too. In
TensorRT such outputs would undo the fusions that are to be compared.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import CompareFuncSimpleArgs, OnnxLoadArgs

from trt_lora.plugins.contract.operators import DOMAIN, Operator, operator_named
from trt_lora.plugins.contract.step import LOGITS
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import ONNX_FILE, Manifest
from trt_lora.scripts.verification.tolerances import TOLERANCES

_MARKABLE_BYTES = 1 << 30  # of weights: polygraphy keeps a marked model in one message of 2 GB


def lora_outputs(path: Path, manifest: Manifest) -> dict[str, Operator]:
    """Return the outputs of all LoRA nodes of an ONNX file, and what computes them.

    Its weights are not read.

    Raises:
        ConfigError: the file is no ONNX model, or has none of the engine's LoRA inputs.
    """
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except DecodeError as error:
        raise ConfigError(f"{path} is not an ONNX model: {error}") from error
    if not any(value.name in manifest.lora_bindings for value in graph.input):
        raise ConfigError(
            f"{path} has no LoRA inputs; give the {ONNX_FILE} of an engine that has, or leave out "
            "the LoRA options"
        )
    nodes = ((node, operator_named(node.op_type)) for node in graph.node if node.domain == DOMAIN)
    return {name: operator for node, operator in nodes if operator for name in node.output}


def mark_sites(groups: Any, manifest: Manifest, sites: Mapping[str, Operator]) -> None:
    """Make the outputs of LoRA nodes outputs of the model, unless the command chooses outputs."""
    load = groups[OnnxLoadArgs]
    if not sites or load.outputs or load.mark_types or load.exclude_outputs:
        return
    weights = sum(record.size_bytes for name, record in manifest.files.items() if ONNX_FILE in name)
    if weights > _MARKABLE_BYTES:
        G_LOGGER.warning(
            f"Outputs of LoRA nodes are not compared by themselves: {weights} bytes of weights are "
            "too many for polygraphy to change the model"
        )
        return
    load.outputs = [*(output.name for output in manifest.outputs), *sites]


def use_tolerance(groups: Any, manifest: Manifest, sites: Mapping[str, Operator]) -> None:
    """Set the tolerances of the engine's dtype, unless the command gives one."""
    compare, limit = groups[CompareFuncSimpleArgs], TOLERANCES[manifest.dtype]
    if compare.atol or compare.rtol or compare.check_error_stat:
        return
    compare.atol = {"": limit.atol, LOGITS: limit.logits_atol}
    compare.rtol = {"": limit.rtol}
    # A few channels of the residual stream are 10000 times the others, and so is their rounding:
    # a sum with it is judged by its mean error.
    sums = {name: "mean" for name, operator in sites.items() if operator.has_addend}
    compare.check_error_stat = {"": "elemwise", **sums} if sums else None
    G_LOGGER.info(
        f"Tolerances for {manifest.dtype}: --atol {limit.atol} {LOGITS}:{limit.logits_atol} "
        f"--rtol {limit.rtol}"
    )
