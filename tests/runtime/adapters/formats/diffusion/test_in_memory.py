"""Tensors that another program has in memory are read as those of a file are."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.diffusion.models import engine
from support.adapters.diffusion.writing import Writing

from trt_lora.plugins.errors import AdapterError, TensorError
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import adapter_of_tensors, load_adapter
from trt_lora.runtime.files.safetensors_file import in_memory
from trt_lora.runtime.memory.tensor import tensor_from_numpy

_PATH = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_STEM = f"lora_unet_{_PATH.replace('.', '_')}"


def test_they_are_what_the_same_file_is_and_their_memory_is_not_kept(tmp_path: Path) -> None:
    manifest, writing = engine("sdxl"), Writing(engine("sdxl"))
    writing.add(_STEM, _PATH, alpha=np.float16(3))
    tensors = writing.tensors
    tensors[f"{_STEM}.lora_up.weight"] = tensors[f"{_STEM}.lora_up.weight"].astype(np.float16)
    save_file(tensors, tmp_path / "a.safetensors")
    given = {name: np.array(tensor) for name, tensor in tensors.items()}
    adapters = (
        load_adapter(tmp_path / "a.safetensors", manifest),
        adapter_of_tensors("a program", given, manifest),
    )
    fitted = [fit_adapter(adapter, manifest).tensors for adapter in adapters]
    for array in given.values():
        array[...] = 7
    assert fitted[0].keys() == fitted[1].keys()
    for name, own in fitted[0].items():
        assert np.array_equal(own.numpy(), fitted[1][name].numpy()), name


def test_a_part_is_read_into_memory_of_its_own() -> None:
    values = np.arange(6, dtype=np.float32)
    (stored,) = in_memory({"x": tensor_from_numpy(values)}).tensors
    part = stored.part(2, 3)
    assert part.tolist() == [2, 3, 4]
    part[...] = 0
    assert values.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_no_adapter_is_refused_by_where_it_is_from() -> None:
    manifest = engine("sdxl")
    with pytest.raises(TensorError, match="tensor from str"):
        adapter_of_tensors("a program", {f"{_STEM}.alpha": "2"}, manifest)
    wide = {f"{_STEM}.lora_{end}.weight": np.ones((3, 3), np.float32) for end in ("up", "down")}
    with pytest.raises(AdapterError, match="a program is for another base model"):
        adapter_of_tensors("a program", wide, manifest)
