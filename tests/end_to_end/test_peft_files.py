"""Shards and other files in a PEFT directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.adapters.peft_fields import (
    Q_AND_V,
    WEIGHTS,
    Running,
    assert_answers_as_peft,
    assert_refused,
    base_of,
    loaded,
)
from support.models import tiny_models as tiny
from support.models.tiny_models import save_adapter, save_model

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.runtime import load_adapter
from trt_lora.runtime.files.untrusted_file import AdapterFile, Bytes, ReadBuffer

pytestmark = pytest.mark.slow  # for the engines that all of them share


@pytest.mark.parametrize("count", [1, 3])
def test_an_adapter_in_shards_has_equal_weights(llama: Running, tmp_path: Path, count: int) -> None:
    whole = save_adapter(llama.model, tmp_path / "whole")
    shards = Path(shutil.copytree(whole, tmp_path / "shards"))
    tensors = load_file(shards / WEIGHTS)
    (shards / WEIGHTS).unlink()
    files = {
        name: f"adapter_model-{i % count + 1:05}-of-{count:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, shards / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (shards / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert load_adapter(shards).content_hash == load_adapter(whole).content_hash
    np.testing.assert_array_equal(loaded(llama, shards)[1], loaded(llama, whole)[1])


@pytest.mark.parametrize("options", [{}, {"target_modules": Q_AND_V}, {"r": 4, "use_rslora": True}])
def test_a_targeted_layer_that_the_file_lacks_is_warned_of_by_name(
    llama: Running, tmp_path: Path, options: dict[str, Any]
) -> None:
    lost = "model.layers.1.self_attn.v_proj"
    adapter = save_adapter(llama.model, tmp_path / "a", **options)
    tensors = load_file(adapter / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if f".{lost}." not in name}
    assert len(tensors) - len(kept) == 2
    save_file(kept, adapter / WEIGHTS, metadata={"format": "pt"})
    coverage, ours = loaded(llama, adapter)
    (warning,) = coverage.warnings
    assert f"targets {lost}, but its file has no tensors" in warning
    assert_answers_as_peft(llama, adapter, ours)  # PEFT fills in a B of zeros


def test_a_pickled_adapter_is_refused_with_the_command_that_converts_it(
    llama: Running, tmp_path: Path
) -> None:
    plain = save_adapter(llama.model, tmp_path / "plain")
    with suppress_output():
        PeftModel.from_pretrained(base_of(llama.model), plain).save_pretrained(
            str(tmp_path / "a"), safe_serialization=False
        )
    assert (tmp_path / "a" / "adapter_model.bin").is_file()
    hint = f"trt-lora convert-adapter {tmp_path / 'a'} OUT --format peft"
    assert_refused(llama, tmp_path / "a", "other weight files: adapter_model.bin", hint)


def test_an_adapter_of_another_base_is_refused_by_its_shapes_before_a_value_is_read(
    llama: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = {**tiny.ARCHITECTURES["Llama"], "hidden_size": 64}
    monkeypatch.setitem(tiny.ARCHITECTURES, "Llama", wider)
    adapter = save_adapter(
        save_model("Llama", tmp_path / "model"), tmp_path / "a", target_modules=Q_AND_V
    )

    ends, original = [], AdapterFile.read

    def read(file: AdapterFile, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes:
        ends.extend([start + size] * (file.path.name == WEIGHTS))
        return original(file, start, size, buffer)

    monkeypatch.setattr(AdapterFile, "read", read)
    shape = "lora_A.weight is in the file [8, 64], expected [r, k] with k=32 and n=32: the adapter"
    assert_refused(llama, adapter, shape, "was trained on another base model")
    length = int.from_bytes((adapter / WEIGHTS).read_bytes()[:8], "little")
    assert ends == [8, 8 + length]  # the header's length, the header
