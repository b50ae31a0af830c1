"""Engines of GGUF files: they answer as transformers does with the library's floats."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from support.build_progress import Notes
from support.models.gguf_files import Type, all_of, as_safetensors, in_gguf
from support.models.loaded_base import loaded
from support.models.quantised import ADAPTER, FOLDER, GGUFS, expected_hashes
from support.models.quantised import VOCABULARY as OF_THE_FOLDER
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_model, tiny_config

from trt_lora.builder.build import list_sites
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import ONNX_CPU_FILE
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

EXACT: dict[str, Any] = {"quantize_level": "exact"}
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPT = 8  # tokens; the others are steps


def some_ids(vocabulary: int) -> Any:
    return np.random.default_rng(0).integers(0, vocabulary, (1, 24))


def operators(engine: Path) -> list[str]:
    return [node.op_type for node in ir.load(engine / ONNX_CPU_FILE).graph]


def check_answers(engine: Path, model: Path) -> None:
    """Logits of the base model must be transformers' of a model in safetensors."""
    ids = some_ids(VOCABULARY)
    with suppress_output():
        reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        theirs = reference(torch.from_numpy(ids)).logits.numpy()
    with open_engine(engine, "onnxruntime") as running:
        ours = engine_logits(running, "", ids, prompt=PROMPT)
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Llama", {"attention_bias": True}),
        ("Mistral", {"head_dim": 32, "num_key_value_heads": 1}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_an_engine_answers_as_transformers_with_the_library_s_floats(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    original = save_model(architecture, tmp_path / "original", **SIZES | fields)
    model = in_gguf(original, tmp_path / "m", all_of(Type.Q4_0))
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **EXACT))
    assert len(manifest.weights) == 14 + (architecture != "Qwen2")  # a tied head of 4 bits is none
    assert {kind.format for kind in manifest.weights.values()} == {"int4"}
    check_answers(tmp_path / "engine", as_safetensors(model, tmp_path / "floats"))


@pytest.mark.slow
@pytest.mark.parametrize("name", GGUFS)
def test_an_engine_of_stored_codes_answers_as_peft(tmp_path: Path, name: str) -> None:
    engine, ids, notes = tmp_path / "engine", some_ids(OF_THE_FOLDER), Notes()
    manifest = quick_build(tiny_config(FOLDER / name, engine, **EXACT), notes)
    assert not any("become" in note for note in notes.notes)
    assert manifest.weights.keys() == expected_hashes(name).keys()
    assert {kind.source for kind in manifest.weights.values()} == {"the checkpoint (gguf)"}
    assert operators(engine).count("MatMulNBits") == len(manifest.weights)
    # A head that is tied lets the embedding read rows of the same codes, where they have 8 bits.
    head = manifest.weights["lm_head"]
    is_tied = name == "gguf_q8_0"
    assert (head.format, head.embedding) == ("int8", "model.embed_tokens" if is_tied else "")
    assert operators(engine).count("GatherBlockQuantized") == is_tied
    reference = PeftReference(FOLDER / name, {"adapter": ADAPTER})
    with open_engine(engine, "onnxruntime") as running:
        running.adapters.load("adapter", ADAPTER, strict=False)
        for adapter in ("", "adapter"):
            ours = engine_logits(running, adapter, ids, prompt=PROMPT)
            theirs = reference.logits(adapter, ids, np.ones_like(ids))
            assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.slow
def test_a_file_of_floats_is_a_model_in_floats(tmp_path: Path) -> None:
    original = save_model("Llama", tmp_path / "original")
    model = in_gguf(original, tmp_path / "m", all_of(Type.F32))
    assert not quick_build(tiny_config(model, tmp_path / "engine")).weights
    check_answers(tmp_path / "engine", original)
    quantised = tiny_config(model, tmp_path / "int8", quantize="int8", quantize_block=16)
    assert len(quick_build(quantised).weights) == 15


@pytest.mark.parametrize("name", GGUFS)
def test_a_plan_has_floats_and_the_build_says_why(tmp_path: Path, name: str) -> None:
    base = loaded(tiny_config(FOLDER / name, tmp_path / "e"), TENSORRT_RTX)
    assert base.codes == {}
    why, grown = base.notes
    assert why.startswith("a plan takes no zeros, no scales below 0, and of 8 bits one scale a row")
    assert grown.startswith("8 linears in codes of gguf become float32, ")


def test_codes_are_not_rounded_a_second_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantize int8 would round twice: .* by gguf"):
        list_sites(tiny_config(FOLDER / "gguf_q4_0", tmp_path / "e", quantize="int8"))


@pytest.mark.parametrize("name", GGUFS)
def test_sites_are_those_of_the_float_model(tmp_path: Path, name: str) -> None:
    sites = list_sites(tiny_config(FOLDER / name, tmp_path / "e")).sites
    assert {site.path for site in sites} == expected_hashes(name).keys() - {"lm_head"}


def test_a_target_that_no_linear_has_is_refused_by_the_header(tmp_path: Path) -> None:
    config = tiny_config(FOLDER / "gguf_q4_0", tmp_path / "e", target_modules=("qproj",))
    with pytest.raises(ConfigError, match="qproj"):
        list_sites(config)
