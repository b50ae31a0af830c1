"""bitsandbytes: nf4, fp4 and int8, loaded by transformers and dequantised by the library."""

# pyright: reportMissingImports=false

from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt
from formats.checks import Weights, check_fixtures, check_made
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    kinds = (Linear4bit, Linear8bitLt)
    modules = [(path, m) for path, m in model.named_modules() if isinstance(m, kinds)]
    return {path: _dequantised(module.weight) for path, module in modules}


def _dequantised(weight: Any) -> Any:
    if isinstance(weight, Int8Params):
        return functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    state = weight.quant_state
    state.dtype = torch.float32
    floats = functional.dequantize_4bit(weight.data, state)
    # Code 8 of fp4 is zero in its table, and minus zero in its kernel for CPUs without AVX-512.
    return floats + 0.0 if state.quant_type == "fp4" else floats


def make(options: dict[str, Any], floats: Path, codes: Path) -> None:
    """Write a checkpoint in codes as transformers does: it quantises what it loads."""
    config: Any = BitsAndBytesConfig
    where: dict[str, Any] = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(
        floats, quantization_config=config(**options), **where
    )
    model.save_pretrained(codes)


if __name__ == "__main__":
    check_fixtures("bitsandbytes", read)
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            fields = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
            how = partial(make, {"load_in_4bit": True, **fields})
            check_made(f"{kind}{', nested' * nested}", how, read)
    # It multiplies by two factors, one behind the other; ours is their product.
    check_made("int8", partial(make, {"load_in_8bit": True}), read, most_ulps=1)
