"""A checkpoint whose linears have random codes: the speed of a plan does not depend on them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a machine with a GPU need not have what builds a model
    import torch

_FILE, _CONFIG = "model.safetensors", "config.json"
_BLOCK, _SCALE = 128, 0.003  # values that share a scale of 4 bits; a scale that keeps x finite
_FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _BLOCK}
_FOUR_BITS |= {"symmetric": True}


def with_random_codes(model: Path, directory: Path, kind: str) -> Path:
    """Save a float checkpoint anew, its layers' linears in codes.

    Args:
        model: directory of the checkpoint.
        directory: to make.
        kind: one of `KINDS`; of fp8, what linears read has a scale, too.
    """
    from safetensors.torch import load_file, save_file

    make, stated = KINDS[kind]
    shutil.copytree(model, directory)
    tensors = load_file(directory / _FILE)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        path, shape = name.removesuffix(".weight"), tensors.pop(name).shape
        tensors |= {f"{path}.{end}": tensor for end, tensor in make(*shape).items()}
    save_file(tensors, directory / _FILE)
    fields = json.loads((directory / _CONFIG).read_text())
    text = json.dumps(fields | {"quantization_config": stated})
    (directory / _CONFIG).write_text(text)
    return directory


def _int4(n: int, k: int) -> "Mapping[str, torch.Tensor]":
    """compressed-tensors' words of eight codes, symmetric."""
    import torch

    limit = 1 << 31
    return {
        "weight_packed": torch.randint(-limit, limit, (n, k // 8), dtype=torch.int32),
        "weight_scale": torch.full((n, k // _BLOCK), _SCALE),
        "weight_shape": torch.tensor([n, k]),
    }


def _fp8(n: int, k: int) -> "Mapping[str, torch.Tensor]":
    """Modelopt's floats, with a scale for the weight and one for x."""
    import torch

    return {
        "weight": torch.randn(n, k).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(_SCALE),
        "input_scale": torch.tensor(_SCALE),
    }


KINDS: Mapping[str, tuple[Callable[[int, int], Any], Mapping[str, Any]]] = {
    "int4": (
        _int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FOUR_BITS}},
        },
    ),
    "fp8": (_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
}
