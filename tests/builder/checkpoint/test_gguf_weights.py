"""Weights of a GGUF file: the library's, bit by bit, under transformers' names and in its order."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.models.checkpoints import check_loads, load, refusal, weights_of, with_config
from support.models.gguf_files import (
    GGUF_FILE,
    Type,
    all_of,
    in_gguf,
    library_weights,
    metadata,
    tensors_of,
    write_gguf,
)
from support.models.quantised import FOLDER, GGUFS, expected_hashes, sha256
from support.models.tiny_models import save_model

from trt_lora.builder.checkpoint.base_model import fingerprint
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.embedding_hashes import embedding_hashes
from trt_lora.builder.checkpoint.formats import gguf as format
from trt_lora.builder.checkpoint.formats.stored_linear import StoredLinear
from trt_lora.builder.checkpoint.stored_linears import dense, stored_linears
from trt_lora.builder.passes.codes.coded_weight import CodedWeight
from trt_lora.plugins.errors import ModelError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
OWN_Q, EMBEDDING = "blk.0.attn_q.weight", "token_embd.weight"
TYPES = {kind.name: kind for kind in Type}
Tensors = dict[str, npt.NDArray[Any]]


def original(directory: Path, architecture: str = "Llama", **fields: Any) -> Path:
    return save_model(architecture, directory / "original", **SIZES | fields)


def codes_of(directory: Path) -> dict[str, Any]:
    stored = stored_linears(Checkpoint(directory))
    assert stored is not None
    return dict(stored.weights())


# ---------------------------------------------------------------------- codes


@pytest.mark.parametrize("name", GGUFS)
def test_weights_are_those_that_the_library_makes(name: str) -> None:
    found = codes_of(FOLDER / name)
    assert {path: sha256(dense(w).numpy()) for path, w in found.items()} == expected_hashes(name)
    assert all(isinstance(weight, CodedWeight) for weight in found.values())


def linear_of(kind: str, rows: npt.NDArray[Any]) -> StoredLinear:
    return StoredLinear("a.q_proj", {kind.lower(): torch.from_numpy(rows)}, {})


@pytest.mark.parametrize(
    ("kind", "bits", "block", "nbytes"),
    [("Q4_0", 4, 32, 18), ("Q8_0", 8, 32, 34), ("Q6_K", 8, 16, 210)],
)
def test_any_bytes_are_the_values_of_the_library(
    kind: str, bits: int, block: int, nbytes: int
) -> None:
    """Scales of both signs and 0, minus 0 and the smallest ones, beside any codes."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (5, 3, nbytes), np.uint8)
    scales = np.array([0.5, -0.25, 0.0, -0.0, 6e-8, -3.0], np.float16)
    place = slice(208, 210) if kind == "Q6_K" else slice(0, 2)
    blocks[:, :, place] = generator.choice(scales, (5, 3, 1)).view(np.uint8)
    rows = blocks.reshape(5, -1)
    weight = format.read(linear_of(kind, rows))
    assert (weight.bits, weight.block, weight.zeros) == (bits, block, None)
    expected = gguf.dequantize(rows, TYPES[kind])
    assert weight.dequantised().tobytes() == expected.astype("<f4").tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_values_too_small_for_a_scale_are_the_library_s(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
    values[:, :32] *= 1e-8
    rows = gguf.quantize(values, TYPES[kind])
    weight = format.read(linear_of(kind, rows))
    assert not weight.scales[:, 0].any()
    assert weight.dequantised().tobytes() == gguf.dequantize(rows, TYPES[kind]).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_scales_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    rows = np.zeros((2, {"Q4_0": 18, "Q8_0": 34, "Q6_K": 210}[kind]), np.uint8)
    scale = np.array([bad], np.float16).view(np.uint8)
    rows[1, -2 if kind == "Q6_K" else 0 :][:2] = scale
    rows[:, 193:208] = 1  # a factor is 0
    with pytest.raises(ModelError, match=f"a.q_proj: {kind.lower()} has scales that are infinite"):
        format.read(linear_of(kind, rows))


# ---------------------------------------------------------------------- names and rows


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Llama", {"attention_bias": True}),
        ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("Mistral", {"head_dim": 32, "num_key_value_heads": 1}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_floats_are_the_original_model_s(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    model = original(tmp_path, architecture, **fields)
    directory = in_gguf(model, tmp_path / "m", all_of(Type.F32))
    expected = weights_of(model)
    if fields.get("tie_word_embeddings"):
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    check_loads(directory, expected)
    assert Checkpoint(directory).quantisation is None


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16)]
)
def test_floats_of_half_the_bits(tmp_path: Path, kind: Any, dtype: torch.dtype) -> None:
    model = original(tmp_path)
    directory = in_gguf(model, tmp_path / "m", all_of(kind))
    expected = {
        name: weight if "norm" in name else weight.to(dtype).float()
        for name, weight in weights_of(model).items()
    }
    check_loads(directory, expected)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_rows_of_codes_are_those_of_the_original(tmp_path: Path, architecture: str) -> None:
    model = original(tmp_path, architecture)
    directory = in_gguf(model, tmp_path / "m", all_of(Type.Q8_0))
    own, coded = weights_of(model), codes_of(directory)
    for path in (Q, K):
        error = (dense(coded[path]) - own[f"{path}.weight"]).abs().max()
        assert error < own[f"{path}.weight"].abs().max() / 127


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0])
def test_a_model_is_loaded_with_the_library_s_weights(tmp_path: Path, kind: Any) -> None:
    """The embedding beside a head of its own too, whose rows are read and never multiplied."""
    directory = in_gguf(original(tmp_path, "Qwen3"), tmp_path / "m", all_of(kind))
    assert "lm_head" in codes_of(directory)
    check_loads(directory, library_weights(directory))
    checkpoint = Checkpoint(directory)
    hashes = embedding_hashes(checkpoint, load(directory, "float32"))
    assert hashes.keys() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("kind", "is_coded"), [(Type.Q4_0, False), (Type.Q8_0, True)])
def test_a_tied_embedding_of_8_bits_is_the_head_s_codes(
    tmp_path: Path, kind: Any, is_coded: bool
) -> None:
    model = original(tmp_path, tie_word_embeddings=True)
    directory = in_gguf(model, tmp_path / "m", all_of(kind))
    assert ("lm_head" in codes_of(directory)) == is_coded
    expected = library_weights(directory)
    head = expected["model.embed_tokens.weight"]
    check_loads(directory, expected | {"lm_head.weight": head})


def test_frequencies_of_the_rotary_embedding_are_not_read(tmp_path: Path) -> None:
    model = original(tmp_path)
    frequencies = {"rope_freqs.weight": np.ones(32, np.float32)}
    directory = changed(model, tmp_path / "m", tensors=lambda tensors: tensors | frequencies)
    expected = load(in_gguf(model, tmp_path / "n", all_of(Type.Q8_0)), "float32").state_dict()
    check_loads(directory, expected)


def test_a_fingerprint_depends_on_the_types(tmp_path: Path) -> None:
    model = original(tmp_path)
    prints = {
        fingerprint(Checkpoint(in_gguf(model, tmp_path / kind.name, all_of(kind))))
        for kind in (Type.F32, Type.F16, Type.Q4_0, Type.Q8_0)
    }
    assert len(prints) == 4


# ---------------------------------------------------------------------- what is refused


def changed(
    model: Path,
    directory: Path,
    *,
    stated: dict[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    types: Callable[[str], Any] = all_of(Type.Q8_0),  # noqa: B008 - it has no state
) -> Path:
    """A model in a GGUF file that says something else, or has other tensors."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    own = {k: v for k, v in (metadata(config) | (stated or {})).items() if v is not None}
    write_gguf(directory / GGUF_FILE, own, tensors(tensors_of(model)), types)
    return directory


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture is 'gemma2', and model_type in config"),
        ({"general.architecture": "qwen2"}, "model_type in config.json is 'llama', where qwen2 is"),
        ({"llama.block_count": 2}, "block_count is 2, and num_hidden_layers in config.json is 1"),
        ({"llama.embedding_length": 32}, "embedding_length is 32, and hidden_size in config.json"),
        ({"llama.feed_forward_length": 64}, "feed_forward_length is 64, and intermediate_size in"),
        ({"llama.attention.head_count": 8}, "head_count is 8, and num_attention_heads in config"),
        ({"llama.attention.head_count_kv": 4}, "head_count_kv is 4, and num_key_value_heads in"),
        ({"llama.attention.head_count_kv": None}, "head_count_kv is 4, and num_key_value_heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv is 'an array of 2', and num_k"),
        ({"llama.attention.head_count": None}, "it says that attn_q has None heads"),
        ({"llama.attention.key_length": 32}, "attention.key_length is 32, and head_dim in config"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-5}, "rms_norm_eps in config.json is 1e-06"),
        ({"llama.rope.freq_base": 5e5}, "freq_base is 500000.0, and rope_theta in config.json is"),
    ],
)
def test_another_model_than_that_of_the_config_is_refused(
    tmp_path: Path, stated: dict[str, Any], message: str
) -> None:
    said = refusal(changed(original(tmp_path), tmp_path / "m", stated=stated))
    assert message in said
    assert "pass the file with the config.json of its own model, or the model's safetensors" in said


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: t | {"blk.0.ffn_gate_inp.weight": t[OWN_Q]}, "it has 'blk.0.ffn_gate_inp.weig"),
        (lambda t: t | {"blk.00.attn_q.weight": t[OWN_Q]}, "it has 'blk.00.attn_q.weight', which"),
        (lambda t: t | {"blk.0.output.weight": t[OWN_Q]}, "it has 'blk.0.output.weight', which no"),
        (lambda t: t | {"attn_q.weight": t[OWN_Q]}, "it has 'attn_q.weight', which no model that"),
        (lambda t: t | {"odd\nname": t[OWN_Q]}, r"it has 'odd\nname', which no model that is read"),
        (lambda t: t | {"blk.7.attn_q.weight": t[OWN_Q]}, "are unknown to the model (model.layers"),
        (lambda t: t | {OWN_Q: t[OWN_Q][:60]}, "attn_q.weight [60, 64] is not of 4 heads in halv"),
        (lambda t: t | {OWN_Q: t[OWN_Q][:56]}, "q_proj.weight is [56, 64], expected [64, 64]"),
        (lambda t: t | {OWN_Q: t[OWN_Q][:, :32]}, "q_proj.weight is [64, 32], expected [64, 64]"),
        (without(OWN_Q), "1 are missing (model.layers.0.self_attn.q_proj.weight)"),
        (without("output_norm.weight"), "1 are missing (model.norm.weight)"),
        (without("output.weight"), "1 are missing (model.embed_tokens.weight)"),
        (without(EMBEDDING), "1 are missing (model.embed_tokens.weight)"),
    ],
)
def test_other_tensors_than_the_model_s_are_refused(
    tmp_path: Path, tensors: Callable[[Tensors], Tensors], message: str
) -> None:
    assert message in refusal(changed(original(tmp_path), tmp_path / "m", tensors=tensors))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.bias"])
def test_codes_of_what_is_no_matrix_are_refused(tmp_path: Path, name: str) -> None:
    def types(own: str) -> Any:
        return Type.Q8_0 if own == name else Type.F32

    directory = changed(original(tmp_path, attention_bias=True), tmp_path / "m", types=types)
    assert f"{name} [64] is Q8_0, as matrices alone can be" in refusal(directory)


def test_floats_and_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def with_nan(tensors: Tensors) -> Tensors:
        return {k: v * np.float32("nan") if "output_norm" in k else v for k, v in tensors.items()}

    model = original(tmp_path)
    assert "has NaN values" in refusal(changed(model, tmp_path / "nan", tensors=with_nan))
    for name, path in ((OWN_Q, Q), (EMBEDDING, "model.embed_tokens.weight")):
        directory = in_gguf(model, tmp_path / path, all_of(Type.Q8_0))
        data = bytearray((directory / GGUF_FILE).read_bytes())
        start = next(
            each.data_offset
            for each in gguf.GGUFReader(directory / GGUF_FILE).tensors
            if each.name == name
        )
        data[start : start + 2] = np.float16("nan").tobytes()
        (directory / GGUF_FILE).write_bytes(data)
        assert f"{path}: q8_0 has scales that are infinite or NaN" in refusal(directory)


def test_a_config_that_states_codes_is_refused(tmp_path: Path) -> None:
    method = {"quant_method": "awq", "bits": 4}
    directory = with_config(FOLDER / "gguf_q4_0", tmp_path / "m", quantization_config=method)
    said = refusal(directory)
    assert "config.json: the weights are quantised by awq, and the weights beside it are in" in said


def test_a_head_that_the_config_ties_and_the_file_does_not_is_refused(tmp_path: Path) -> None:
    directory = with_config(FOLDER / "gguf_q4_0", tmp_path / "m", tie_word_embeddings=True)
    assert "ties lm_head.weight and model.embed_tokens.weight" in refusal(directory)


# ---------------------------------------------------------------------- which file is read


def test_safetensors_beside_the_file_are_read(tmp_path: Path) -> None:
    model = original(tmp_path)
    (model / GGUF_FILE).write_bytes(b"no GGUF")
    check_loads(model, weights_of(model))
    assert Checkpoint(model).gguf is None


def test_two_files_are_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "gguf_q4_0", tmp_path / "m")
    shutil.copyfile(tmp_path / "m" / GGUF_FILE, tmp_path / "m" / "b.gguf")
    assert "has 2 GGUF files, b.gguf, model.gguf; keep one" in refusal(tmp_path / "m")


def test_a_part_of_a_file_is_refused_and_a_file_of_one_part_is_not(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "gguf_q4_0", tmp_path / "m")
    file = (tmp_path / "m" / GGUF_FILE).rename(tmp_path / "m" / "q-00001-of-00001.gguf")
    assert load(tmp_path / "m", "float32")
    file.rename(tmp_path / "m" / "q-00001-of-00003.gguf")
    said = refusal(tmp_path / "m")
    assert "has parts of a GGUF file, q-00001-of-00003.gguf; make one of them with llama-" in said
