"""Small Llamas in codes, each made and read back by the library of its format.

`expected.json` of each says which library, how, and the SHA-256 of the weights [n, k] that the
library itself makes of the codes, in float32.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent.parent / "data" / "quantised"
ADAPTER = FOLDER / "adapter"
GGUFS = ("gguf_q4_0", "gguf_q8_0")
NAMES = sorted({path.parent.name for path in FOLDER.glob("*/expected.json")} - {*GGUFS})
# TensorRT multiplies by these: FP8 with a scale for each row, or for all.
FLOAT8 = ("ct_fp8_bf16", "fbgemm_fp8", "modelopt_fp8")
# ONNX Runtime multiplies by these codes; the others become floats.
INTEGERS = [
    name
    for name in NAMES
    if name.startswith(("awq", "gptq", "ct_pack", "ct_int8", "modelopt_int4"))
]
VOCABULARY = 32


def expected_hashes(name: str) -> dict[str, str]:
    """Return the hash of each linear's weight, with the factors of x where there are such."""
    expected: dict[str, Any] = json.loads((FOLDER / name / "expected.json").read_text())
    hashes: dict[str, str] = expected["sha256"]
    hashes.update(expected.get("sha256_times_pre_quant_scale", {}))
    return hashes


def library_of(name: str) -> str:
    """Return the name and version of the library that made a checkpoint."""
    library: str = json.loads((FOLDER / name / "expected.json").read_text())["library"]
    return library


def sha256(weight: npt.NDArray[Any]) -> str:
    """Return the hash of a weight in float32."""
    return hashlib.sha256(np.ascontiguousarray(weight, dtype="<f4").tobytes()).hexdigest()
