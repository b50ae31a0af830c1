"""Adapters of --lora-dir decide modules and ranks, or are refused before the export."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.build_progress import StopAt
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, tiny_config

from trt_lora.builder import build_engine
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime import load_adapter
from trt_lora.runtime.adapters.fitting.fit import preview_adapter


@pytest.mark.slow
def test_real_adapters_decide_modules_and_ranks(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    wide = save_adapter(tiny_engine.model, tmp_path / "wide", r=12, target_modules=["o_proj"])
    manifest = quick_build(
        tiny_config(
            tiny_engine.model,
            tmp_path / "engine",
            target_modules=(),
            max_lora_rank=None,
            lora_dirs=(tiny_engine.adapter, wide),
        )
    )
    assert {site.module.name for site in manifest.sites if site.module} == {
        "attn_q", "attn_v", "attn_dense",
    }  # fmt: skip
    assert (manifest.max_lora_rank, manifest.opt_lora_rank) == (12, 4)


def test_an_engine_is_built_for_an_adapter_of_the_head_as_peft_saves_it(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    head = save_adapter(tiny_engine.model, tmp_path / "a", target_modules=["q_proj", "lm_head"])
    config = tiny_config(tiny_engine.model, tmp_path / "e", target_modules=(), lora_dirs=(head,))
    manifest = quick_build(config)
    assert {site.path.rpartition(".")[2] for site in manifest.sites} == {"q_proj", "lm_head"}
    assert preview_adapter(load_adapter(head), manifest).is_taken


def test_an_adapter_that_no_engine_can_take_is_refused_before_the_model_is_looked_at(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    adapter = with_tensor(tiny_engine, tmp_path / "a", "layers.0.self_attn.q_proj.lora_B.bias")
    config = tiny_config(tmp_path / "no model", tmp_path / "e", lora_dirs=(adapter,))
    with pytest.raises(AdapterError, match=r"lora_B\.bias cannot be used: it is a bias"):
        build_engine(config)


def test_an_adapter_with_a_trained_copy_of_a_base_weight_is_refused_before_the_export(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    adapter = with_tensor(tiny_engine, tmp_path / "a", "embed_tokens.weight")
    config = tiny_config(tiny_engine.model, tmp_path / "e", lora_dirs=(adapter,))
    with pytest.raises(AdapterError, match=r"embed_tokens\.weight cannot be used: it has other"):
        build_engine(config, StopAt("export", AssertionError()))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def with_tensor(tiny_engine: TinyEngine, directory: Path, name: str) -> Path:
    """The tiny adapter with one more tensor, of the shape of the embeddings."""
    shutil.copytree(tiny_engine.adapter, directory)
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors[f"base_model.model.model.{name}"] = np.ones((VOCABULARY, 32), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_options_that_contradict_a_real_adapter_are_refused(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    config = tiny_config(tiny_engine.model, tmp_path / "e", lora_dirs=(tiny_engine.adapter,))
    with pytest.raises(ConfigError, match=r"--max-lora-rank is 2, but an adapter .* has rank 4"):
        build_engine(replace(config, max_lora_rank=2))
    with pytest.raises(ConfigError, match=r"leaves out; add attn_q"):
        build_engine(replace(config, target_modules=("attn_v",)))
    with pytest.raises(AdapterError, match=r"nowhere"):
        build_engine(replace(config, lora_dirs=(Path("nowhere"),)))
    assert list(tmp_path.iterdir()) == []


def test_every_module_that_the_targets_leave_out_is_named_at_once(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    adapter = save_adapter(tiny_engine.model, tmp_path / "a")
    config = tiny_config(
        tiny_engine.model,
        tmp_path / "e",
        target_modules=("attn_q", "attn_k", "attn_v"),
        lora_dirs=(tiny_engine.adapter, adapter),
    )
    with pytest.raises(ConfigError) as raised:
        build_engine(config)
    message = str(raised.value)
    assert "_proj and 7 more" in message
    assert message.endswith(
        "--lora-target-modules attn_q attn_k attn_v leaves out; add attn_dense mlp_4h_to_h "
        "mlp_gate mlp_h_to_4h, or leave the option out"
    )
    more = ("attn_dense", "mlp_4h_to_h", "mlp_gate", "mlp_h_to_4h")  # then it goes on
    with pytest.raises(ZeroDivisionError):
        build_engine(
            replace(config, target_modules=(*config.target_modules, *more)),
            StopAt("load", ZeroDivisionError()),
        )
