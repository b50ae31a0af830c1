"""Adapters for the tests of saving."""

from pathlib import Path
from typing import Any

import numpy as np
from support.fakes.fake_engine import make_manifest, write_peft

MANIFEST = make_manifest()
PATHS = [site.path for site in MANIFEST.sites]
RANKS = dict(zip(PATHS, (2, 3, 1, 2), strict=True))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peft(directory: Path, *, rslora: bool = False, **fields: object) -> Path:
    """A PEFT adapter whose sites differ in rank and alpha, by patterns as people write them."""
    rng = np.random.default_rng(0)
    tensors = {}
    for path, rank in RANKS.items():
        tensors[f"{path}.lora_A"] = rng.standard_normal((rank, 8), np.float32)
        tensors[f"{path}.lora_B"] = rng.standard_normal((6, rank), np.float32)
    patterns = {
        "rank_pattern": {r"0.*v_proj": 3, "layers.1.self_attn.q_proj": 1},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 7, "1.self_attn.q_proj": 0.5},
    }
    options: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": rslora,
        "base_model_name_or_path": "org/tiny",
    }
    return write_peft(directory, tensors, **options | patterns | fields)


def place(directory: Path, name: str, format: str) -> Path:
    return directory / (f"{name}.onnx_adapter" if format == "onnxruntime" else name)
