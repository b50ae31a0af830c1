"""GPTQModel: versions 1 and 2 of its files, read by the linear of its torch backend."""

# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import torch
from formats.checks import Tensors, Weights, check_fixtures, tensors_of_linears
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint."""
    fields = json.loads((directory / "config.json").read_text())["quantization_config"]
    stored = tensors_of_linears(directory)
    return {path: _weight(tensors, fields) for path, tensors in stored.items()}


def _weight(tensors: Tensors, fields: dict[str, Any]) -> Any:
    k, n = len(tensors["g_idx"]), tensors["qweight"].shape[1]
    options = {name: fields[name] for name in ("bits", "group_size", "sym", "desc_act")}
    linear = TorchLinear(**options, in_features=k, out_features=n, register_buffers=True)
    linear.load_state_dict(tensors, strict=True)
    if fields["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(linear, fields["bits"], torch.int32)
    linear.scales = linear.scales.float()  # or it multiplies in float16
    return linear.dequantize_weight().T


if __name__ == "__main__":
    check_fixtures("gptqmodel", read)
