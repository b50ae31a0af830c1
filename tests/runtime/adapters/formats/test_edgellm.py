"""TensorRT-Edge-LLM's processed adapters: A [k, r], B [r, n], the scale in B, float16."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from support.fakes.fake_engine import write_peft

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.memory.dtypes import Array

pytestmark = pytest.mark.needs_torch

PROCESSED = "processed_adapter_model.safetensors"
Q, LM_HEAD = "model.layers.0.self_attn.q_proj", "lm_head"


def processed(directory: Path, tensors: dict[str, Array]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / PROCESSED)
    return directory


def peft(directory: Path, **fields: object) -> tuple[Path, Array, Array]:
    """A PEFT adapter of rank 3 on a square linear, its A [3, 3] and its B [3, 3]."""
    a, b = np.random.default_rng(0).standard_normal((2, 3, 3), np.float32)
    tensors = {f"{Q}.lora_A": a, f"{Q}.lora_B": b}
    return write_peft(directory, tensors, **{"r": 3, **fields}), a, b


# ----------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("names", BindingNames)
def test_either_spelling_is_read(tmp_path: Path, names: BindingNames) -> None:
    a, b = np.eye(4, 2, dtype=np.float16), np.full((2, 5), 3, np.float16)
    tensors = {names.binding("A", Q): a, names.binding("B", Q): b}
    adapter = load_adapter(processed(tmp_path / "a", tensors))
    assert adapter.weights.keys() == tensors.keys()
    found = adapter.pairs()[Q]
    np.testing.assert_array_equal(found[0].values(), a)
    np.testing.assert_array_equal(found[1].values(), b)
    assert found[1].scale == 1  # it is in B already


def test_the_processed_file_beside_what_it_was_made_from_is_read_by_its_own_name(
    tmp_path: Path,
) -> None:
    directory, _, _ = peft(tmp_path / "a")
    save_file({f"{Q}.lora_A.weight": np.ones((4, 2), np.float16)}, directory / PROCESSED)
    with pytest.raises(AdapterError, match=f"holds adapter_model.safetensors and {PROCESSED}"):
        load_adapter(directory)
    assert load_adapter(directory / PROCESSED).weights.keys() == {f"{Q}.lora_A.weight"}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    directory = processed(tmp_path / "a", {"lora_A_q": np.ones((4, 2), np.float16)})
    data = (directory / PROCESSED).read_bytes()
    (directory / PROCESSED).write_bytes(data[:-1])
    with pytest.raises(AdapterError, match="not a valid safetensors file"):
        load_adapter(directory)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    save_file({"lora_A_q": np.ones((4, 2), np.float16)}, tmp_path / "elsewhere")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / PROCESSED).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="leads out of the adapter's directory"):
        load_adapter(tmp_path / "a")


# ----------------------------------------------------------------------------------------- writing


def test_float16_is_written_with_the_scale_folded_in_float32(tmp_path: Path) -> None:
    source, a, b = peft(tmp_path / "a", lora_alpha=7)
    conversion = save_adapter(load_adapter(source), tmp_path / "out", "edgellm")
    written = load_file(tmp_path / "out" / PROCESSED)
    # A square linear of its own rank: an orientation that is guessed from shapes cannot be right.
    exact = b.T * np.float32(7 / 3)
    assert {name: array.dtype for name, array in written.items()} == {
        f"{Q}.lora_A.weight": np.float16,
        f"{Q}.lora_B.weight": np.float16,
    }
    np.testing.assert_array_equal(written[f"{Q}.lora_A.weight"], a.T.astype(np.float16))
    np.testing.assert_array_equal(written[f"{Q}.lora_B.weight"], exact.astype(np.float16))
    errors = [np.abs(x - x.astype(np.float16)).max() for x in (a, exact)]
    assert conversion.rounding_error == pytest.approx(max(errors))


def test_a_scale_that_float16_would_round_is_applied_before_the_cast(tmp_path: Path) -> None:
    b = np.full((5, 1), 1 + 2**-12, np.float32)  # alone, float16 rounds it to 1
    tensors = {f"{Q}.lora_A": np.ones((1, 4), np.float32), f"{Q}.lora_B": b}
    source = write_peft(tmp_path / "a", tensors, r=1, lora_alpha=4095)
    save_adapter(load_adapter(source), tmp_path / "out", "edgellm")
    written = load_file(tmp_path / "out" / PROCESSED)[f"{Q}.lora_B.weight"]
    assert set(written.ravel()) == {np.float16(np.float32(1 + 2**-12) * np.float32(4095))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_is_written_where_it_is_asked_for(tmp_path: Path, dtype: str) -> None:
    source, a, b = peft(tmp_path / "a", lora_alpha=6)
    save_adapter(load_adapter(source), tmp_path / "out", "edgellm", dtype=dtype)
    written = load_torch_file(tmp_path / "out" / PROCESSED)
    for name, values in (("A", a.T.copy()), ("B", b.T * np.float32(2))):
        expected = torch.from_numpy(values).to(getattr(torch, dtype))
        assert torch.equal(written[f"{Q}.lora_{name}.weight"], expected)


def test_the_config_beside_it_asks_for_no_further_scale(tmp_path: Path) -> None:
    source, _, _ = peft(tmp_path / "a", lora_alpha=7, base_model_name_or_path="org/base")
    save_adapter(load_adapter(source), tmp_path / "out", "edgellm")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["lora_alpha"] == config["r"] == 3
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "org/base")
    with safe_open(tmp_path / "out" / PROCESSED, framework="np") as file:
        assert file.metadata() == {"format": "pt"}  # no engine, no fingerprint


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    source, _, _ = peft(tmp_path / "a", lora_alpha=1e6)
    with pytest.raises(AdapterError, match=r"lora_B.* beyond the range of float16"):
        save_adapter(load_adapter(source), tmp_path / "out", "edgellm")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_factor_without_its_other_is_refused(tmp_path: Path) -> None:
    save_file({f"lora_B_{LM_HEAD}": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=f"{LM_HEAD} has no A"):
        save_adapter(load_adapter(tmp_path / "a.safetensors"), tmp_path / "out", "edgellm")
