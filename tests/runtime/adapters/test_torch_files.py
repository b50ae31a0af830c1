"""Files that torch's safetensors wrote, of every dtype of LoRA weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.load import load_adapter

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_file_keeps_the_dtype(tmp_path: Path, dtype: str) -> None:
    values = torch.randn(4, 2).to(getattr(torch, dtype))
    save_file({"lora_A_q": values}, tmp_path / "adapter.safetensors")
    weight = load_adapter(tmp_path / "adapter.safetensors").weights["lora_A_q"]
    assert weight.dtype == dtype
    np.testing.assert_array_equal(weight.values(), values.to(torch.float32).numpy())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_refused_by_its_tensor(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    good, bad = torch.ones(4, 2).to(dtype), torch.ones(2, 3).to(dtype)
    bad[1, 2] = value
    save_file({"lora_A_q": good, "lora_B_q": bad}, tmp_path / "adapter.safetensors")
    with pytest.raises(AdapterError, match="lora_B_q holds NaN or infinity"):
        load_adapter(tmp_path / "adapter.safetensors").in_memory()
