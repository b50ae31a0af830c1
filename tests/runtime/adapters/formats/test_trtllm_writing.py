"""Writing TensorRT-LLM's format: what is written is what TensorRT-LLM converts to."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.trtllm_files import (
    CONFIG,
    FUSED_QKV,
    LAYER,
    MLP,
    PARTS,
    WEIGHTS,
    Q,
    delta,
    factors,
    rows_of,
    stored,
)
from support.fakes.fake_engine import write_peft

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.memory.dtypes import Array


def peft(directory: Path, pairs: dict[str, tuple[Array, Array]], **fields: object) -> Path:
    tensors = {
        f"{path}.lora_{factor}": array
        for path, pair in pairs.items()
        for factor, array in zip("AB", pair, strict=True)
    }
    return write_peft(directory, tensors, **fields)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_written_is_what_tensorrt_llm_converts_to(tmp_path: Path, dtype: str) -> None:
    q1, k0 = factors(2, 3, 5, seed=1), factors(1, 3, 4, seed=2)
    gate_up, down = factors(2, 3, 6, seed=3), factors(3, 3, 3, seed=4)
    pairs = {
        LAYER.format(1, "q_proj"): q1,
        f"{MLP}gate_up_proj": gate_up,
        f"{MLP}down_proj": down,
        LAYER.format(0, "k_proj"): k0,
    }
    ranks = {LAYER.format(0, "k_proj"): 1, f"{MLP}down_proj": 3}
    source = peft(tmp_path / "peft", pairs, r=2, lora_alpha=3, rank_pattern=ranks)
    save_adapter(load_adapter(source), tmp_path / "out", "trtllm", dtype=dtype)

    # scale = alpha / rank goes into B; module id, layer, rank, whether it is DoRA's
    swapped = np.concatenate([gate_up[1][3:], gate_up[1][:3]])
    rows = rows_of([
        (k0[0], k0[1] * np.float32(3)),
        (down[0], down[1] * np.float32(1)),
        (gate_up[0], swapped * np.float32(1.5)),
        (q1[0], q1[1] * np.float32(1.5)),
    ])  # fmt: skip
    weights = np.load(tmp_path / "out" / WEIGHTS, allow_pickle=False)
    config = np.load(tmp_path / "out" / CONFIG, allow_pickle=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {WEIGHTS, CONFIG}
    assert weights.dtype == np.dtype("V2" if dtype == "bfloat16" else dtype)
    assert weights.shape == (1, 4, 18)
    assert weights.tobytes() == stored(rows, dtype).tobytes()
    assert config.dtype == np.int32
    assert config.tolist() == [[[2, 0, 1, 0], [6, 0, 3, 0], [18, 0, 2, 0], [1, 1, 2, 0]]]


def test_the_scale_is_folded_in_float32_before_the_cast(tmp_path: Path) -> None:
    a, b = np.ones((1, 3), np.float32), np.full((5, 1), 1 + 2**-10, np.float32)
    source = peft(tmp_path / "peft", {Q: (a, b)}, r=1, lora_alpha=3)
    save_adapter(load_adapter(source), tmp_path / "out", "trtllm", dtype="bfloat16")
    weights = np.load(tmp_path / "out" / WEIGHTS).view(np.uint16)[0, 0]
    exact = stored(b[:, 0] * np.float32(3), "bfloat16").view(np.uint16)
    np.testing.assert_array_equal(weights[3:], exact)


def test_the_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    half = (factors(2, 3, 5)[0].astype(np.float16), factors(2, 3, 5)[1].astype(np.float16))
    source = peft(tmp_path / "peft", {Q: half})
    save_adapter(load_adapter(source), tmp_path / "out", "trtllm")
    assert np.load(tmp_path / "out" / WEIGHTS).dtype == np.float16


def test_a_manifest_makes_the_rows_those_of_its_engine(tmp_path: Path) -> None:
    pairs = {LAYER.format(0, name): factors(2, 3, n, seed=n) for name, n in PARTS.items()}
    adapter = load_adapter(peft(tmp_path / "peft", pairs))
    save_adapter(adapter, tmp_path / "out", "trtllm", manifest=FUSED_QKV)
    assert np.load(tmp_path / "out" / CONFIG).tolist() == [[[0, 0, 6, 0]]]
    row = np.load(tmp_path / "out" / WEIGHTS)[0, 0]
    found = delta(row[:18].reshape(6, 3), row[18:].reshape(10, 6))
    expected = np.concatenate([delta(*pair) for pair in pairs.values()], axis=1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["lm_head"], "no module id or no layer for lm_head"),
        (["model.self_attn.q_proj"], "no layer for model.self_attn.q_proj"),
        (["model.layers.0.adapter_proj"], "no module id"),
        (
            [f"model.layers.0.moe.experts.{i}.w1" for i in (0, 1)],
            "are both moe_h_to_4h of layer 0 to TensorRT-LLM",
        ),
        (["gpt_neox.layers.0.attention.query_key_value"], "alternates heads"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    tmp_path: Path, paths: list[str], message: str
) -> None:
    adapter = load_adapter(peft(tmp_path / "peft", {path: factors(2, 3, 9) for path in paths}))
    with pytest.raises(AdapterError, match=message):
        save_adapter(adapter, tmp_path / "out", "trtllm")
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


def test_a_value_beyond_the_range_is_refused(tmp_path: Path) -> None:
    a, b = factors(1, 3, 5)
    adapter = load_adapter(peft(tmp_path / "peft", {Q: (a, b * 1000)}, r=1, lora_alpha=100))
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        save_adapter(adapter, tmp_path / "out", "trtllm", dtype="float16")


def test_a_factor_without_its_other_is_refused(tmp_path: Path) -> None:
    save_file({f"lora_A_{Q}": factors(2)[0].T.copy()}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=f"{Q} has no B"):
        save_adapter(load_adapter(tmp_path / "a.safetensors"), tmp_path / "out", "trtllm")
