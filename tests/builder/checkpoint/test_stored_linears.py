"""Checkpoints in codes: every weight is that which the library of its format makes, bit by bit."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models.checkpoints import (
    Weights,
    halves,
    pickled,
    refusal,
    with_config,
    with_file,
    with_shards,
    with_weights,
)
from support.models.quantised import FLOAT8, FOLDER, INTEGERS, NAMES, expected_hashes, sha256

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.embedding_hashes import embedding_hashes
from trt_lora.builder.checkpoint.quantisation import METHODS
from trt_lora.builder.checkpoint.stored_linears import FORMATS, dense, stored_linears
from trt_lora.builder.passes.codes.coded_weight import CodedWeight, unpacked

LAYER = "model.layers.0"
Q, K, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.down_proj"


def weights(name: str) -> dict[str, Any]:
    stored = stored_linears(Checkpoint(FOLDER / name))
    assert stored is not None
    return dict(stored.weights())


def test_every_method_has_a_reader() -> None:
    assert FORMATS.keys() == {*METHODS}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_the_library_makes(name: str) -> None:
    found = {path: sha256(dense(weight).numpy()) for path, weight in weights(name).items()}
    if name != "bnb_int8":
        assert found == expected_hashes(name)
        return
    # The library multiplies by two factors, one behind the other; an operator has one.
    stored = load_file(FOLDER / name / "model.safetensors")
    for path, weight in weights(name).items():
        rows = stored[f"{path}.weight"].float() * stored[f"{path}.SCB"][:, None]
        library = (rows * 7.874015718698502e-3).numpy()
        assert sha256(library) == expected_hashes(name)[path]
        np.testing.assert_array_max_ulp(dense(weight).numpy(), library, 1)


@pytest.mark.parametrize("name", NAMES)
def test_integers_fp8_by_rows_and_nvfp4_stay_codes_and_all_else_becomes_floats(name: str) -> None:
    checkpoint = Checkpoint(FOLDER / name)
    assert checkpoint.quantisation is not None
    assert checkpoint.quantisation.scales_x == ("awq" in name)
    found = weights(name).values()
    coded = [weight for weight in found if isinstance(weight, CodedWeight)]
    assert all(weight.is_float == ("fp" in name) for weight in coded)
    if name == "fp8_block":  # a weight smaller than a square has one scale
        assert max(n for n, _ in (weight.shape for weight in coded)) <= 128
        return
    is_coded = name in (*INTEGERS, *FLOAT8, "bnb_int8", "modelopt_nvfp4")
    assert len(coded) == is_coded * len(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_loaded_with_these_weights(name: str) -> None:
    checkpoint = Checkpoint(FOLDER / name)
    model = load_model(checkpoint, "float32")
    for path, weight in weights(name).items():
        assert torch.equal(model.get_submodule(path).weight, dense(weight))
    stored = load_file(FOLDER / name / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"].float())
    assert not hasattr(model.config, "quantization_config")
    assert embedding_hashes(checkpoint, model).keys() == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


def with_head(stored: Weights) -> Weights:
    """The head in codes, too, all of 3 / 127."""
    head = torch.full((32, 128), 3, dtype=torch.int8)
    return stored | {"lm_head.weight": head, "lm_head.SCB": torch.ones(32)}


def test_a_head_in_codes_has_no_hash_of_its_own(tmp_path: Path) -> None:
    directory = with_weights(FOLDER / "bnb_int8", tmp_path / "m", with_head)
    checkpoint = Checkpoint(directory)
    model = load_model(checkpoint, "float32")
    assert torch.allclose(model.lm_head.weight, torch.tensor(3 / 127))
    assert embedding_hashes(checkpoint, model).keys() == {"model.embed_tokens.weight"}


def test_modelopt_without_a_field_in_the_config(tmp_path: Path) -> None:
    directory = with_config(FOLDER / "modelopt_fp8", tmp_path / "m", quantization_config=None)
    stored = stored_linears(Checkpoint(directory))
    assert stored is not None
    found = {path: sha256(dense(weight).numpy()) for path, weight in stored.weights()}
    assert found == expected_hashes("modelopt_fp8")


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
def test_four_bits_that_are_a_byte_each(tmp_path: Path, form: str) -> None:
    """Weights of one form, and zeros of older releases of the other."""
    source = FOLDER / "ct_pack_asym"

    def in_bytes(stored: Weights) -> Weights:
        for path, weight in weights("ct_pack_asym").items():
            stored[f"{path}.weight_zero_point"] = torch.from_numpy(weight.zeros).to(torch.int8) - 8
            if form == "int-quantized":
                codes = torch.from_numpy(unpacked(weight.codes)).to(torch.int8)
                stored[f"{path}.weight"] = codes - 8
                del stored[f"{path}.weight_packed"], stored[f"{path}.weight_shape"]
        return stored

    fields = json.loads((source / "config.json").read_text())["quantization_config"]
    directory = with_config(
        with_weights(source, tmp_path / "weights", in_bytes),
        tmp_path / "m",
        quantization_config=fields | {"format": form},
    )
    stored = stored_linears(Checkpoint(directory))
    assert stored is not None
    found = {path: sha256(dense(weight).numpy()) for path, weight in stored.weights()}
    assert found == expected_hashes("ct_pack_asym")


def test_shards_hold_parts_of_a_linear(tmp_path: Path) -> None:
    source = FOLDER / "gptq_v2"
    directory = with_shards(source, tmp_path / "m", halves(source))
    stored = stored_linears(Checkpoint(directory))
    assert stored is not None
    found = {path: sha256(dense(weight).numpy()) for path, weight in stored.weights()}
    assert found == expected_hashes("gptq_v2")


# ---------------------------------------------------------------------- what is refused


def replaced(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Weights], Weights]:
    return lambda stored: stored | {name: change(stored[name]).contiguous()}


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda stored: {key: value for key, value in stored.items() if key != name}


def first_becomes(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq_v2", replaced(f"{Q}.scales", first_becomes(float("nan"))), "negative, infinite or"),
        ("awq_gemm", replaced(f"{Q}.scales", first_becomes(-1)), "scales that are negative"),
        ("ct_pack_asym", replaced(f"{Q}.weight_scale", first_becomes(float("inf"))), "infinite"),
        ("fp8_block", replaced(f"{Q}.weight_scale_inv", first_becomes(-1)), "negative"),
        ("gptq_sym", replaced(f"{Q}.scales", first_becomes(0)), "scales are 0 where codes are not"),
        (
            "fbgemm_fp8",
            replaced(f"{Q}.weight_scale", first_becomes(0)),
            "scales that are 0 where codes are not",
        ),
        (
            "modelopt_int4awq",
            replaced(f"{DOWN}.pre_quant_scale", lambda w: w[1:]),
            "pre_quant_scale has 255 values, expected 256 finite ones",
        ),
        (
            "modelopt_int4awq",
            replaced(f"{DOWN}.pre_quant_scale", first_becomes(float("inf"))),
            "expected 256 finite ones",
        ),
        (
            "fbgemm_fp8",
            replaced(f"{Q}.weight_scale", lambda w: w[1:]),
            "one for each 1 x 128 are expected",
        ),
        ("modelopt_fp8", replaced(f"{Q}.weight", first_becomes(float("nan"))), "weight has NaN"),
        ("bnb_int8", replaced(f"{Q}.SCB", first_becomes(0)), "scales are 0 where codes are not"),
        (
            "gptq_v1_act",
            replaced(f"{Q}.g_idx", first_becomes(9)),
            "g_idx does not name every group",
        ),
        (
            "gptq_v1_act",
            replaced(f"{K}.g_idx", lambda groups: groups.flip(0)),
            f"g_idx of {Q} is not that of the other linears",
        ),
        ("gptq_v2", without(f"{Q}.scales"), "scales is missing beside"),
        ("gptq_v2", without(f"{Q}.qzeros"), "qzeros is missing beside"),
        ("gptq_v2", replaced(f"{Q}.scales", lambda s: s[:, :-1]), "these are no blocks of k"),
        ("gptq_v2", replaced(f"{Q}.scales", lambda s: s[:3]), "these are no blocks of k"),
        ("gptq_v2", replaced(f"{Q}.qweight", lambda w: w.float()), "qweight is float32"),
        ("awq_gemm", replaced(f"{Q}.qzeros", lambda z: z[:, :-1]), "these are no blocks of k"),
        (
            "ct_pack_sym",
            replaced(f"{Q}.weight_shape", lambda shape: shape * 2),
            "weight_shape is [256, 256], weight_packed has [128, 128] codes",
        ),
        ("ct_pack_sym", without(f"{Q}.weight_packed"), "weight is missing beside"),
        (
            "ct_pack_sym",
            replaced(f"{Q}.weight_shape", lambda shape: shape[:1]),
            f"{Q} cannot be read: ValueError",
        ),
        (
            "ct_pack_asym",
            replaced(f"{Q}.weight_zero_point", lambda _: torch.full((128, 4), 8, dtype=torch.int8)),
            "weight_zero_point has codes beyond the range of 4 bits",
        ),
        (
            "bnb_nf4",
            replaced(f"{Q}.weight.quant_map", lambda table: table[:3]),
            f"{Q} cannot be read: IndexError",
        ),
        ("bnb_nf4", without(f"{Q}.weight.absmax"), "weight.absmax is missing beside"),
        ("bnb_nf4", replaced(f"{Q}.weight", lambda w: w[1:]), "has 16382 codes, and its shape is"),
        (
            "bnb_nf4",
            replaced(f"{Q}.weight.quant_state.bitsandbytes__nf4", lambda s: s[:9]),
            "does not hold bitsandbytes' description",
        ),
        (
            "bnb_fp4",
            replaced(f"{Q}.weight.absmax", lambda a: a[1:]),
            "has 255 values for 256 blocks",
        ),
        (
            "fp8_block",
            replaced(f"{DOWN}.weight_scale_inv", lambda s: s[:, :1]),
            "for each 128 x 128",
        ),
        ("fp8_block", replaced(f"{Q}.weight", lambda w: w.float()), "weight is float32"),
        ("fbgemm_fp8", without(f"{Q}.weight"), "weight is missing beside"),
        *(
            (
                "modelopt_fp8",
                replaced(f"{Q}.input_scale", partial(torch.full_like, fill_value=scale)),
                f"input_scale is {scale}, expected one number above 0",
            )
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ),
        (
            "modelopt_fp8",
            replaced(f"{Q}.input_scale", lambda s: torch.stack([s, s])),
            "expected one number above 0",
        ),
        # Tensors without their linear, or of another format.
        (
            "modelopt_int4awq",
            lambda s: s | {"model.layers.7.o_proj.pre_quant_scale": torch.ones(4)},
            "are unknown to the model (model.layers.7.o_proj.pre_quant_scale)",
        ),
        (
            "gptq_v2",
            lambda s: s | {"model.layers.0.x.weight_packed": torch.ones(4, 4, dtype=torch.int32)},
            "has quantised weights that nothing dequantises: model.layers.0.x.weight_packed",
        ),
        (
            "awq_gemm",
            replaced("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)),
            "has quantised weights that nothing dequantises: lm_head.weight",
        ),
        ("gptq_v2", without("model.norm.weight"), "1 are missing (model.norm.weight)"),
        (
            "gptq_v2",
            lambda s: {k: v for k, v in s.items() if not k.startswith(Q)},
            f"1 are missing ({Q}.weight)",
        ),
        (
            "bnb_int8",
            lambda s: {k: v for k, v in s.items() if "SCB" not in k and "format" not in k},
            "no linear has the tensors of that",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    tmp_path: Path, name: str, change: Callable[[Weights], Weights], message: str
) -> None:
    assert message in refusal(with_weights(FOLDER / name, tmp_path / "m", change))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gptq_v2", {"checkpoint_format": "gptq"}, "may be that of the other version"),
        ("gptq_v1_act", {"checkpoint_format": "gptq_v2"}, "may be that of the other version"),
        ("gptq_sym", {"checkpoint_format": "gptq_v2"}, "zeros are 7 to 7, sym is True"),
        ("gptq_v2", {"checkpoint_format": "marlin"}, "'marlin', and 'gptq' or 'gptq_v2' is read"),
        ("gptq_v2", {"bits": 3}, "bits of its quantisation is 3, and 4 or 8 is read"),
        ("gptq_v2", {"bits": None}, "bits of its quantisation is None, and 4 or 8 is read"),
        ("awq_gemm", {"version": "gemv"}, "version of its quantisation is 'gemv'"),
        ("awq_gemm", {"bits": 8}, "bits of its quantisation is 8, and 4 is read"),
        ("ct_pack_sym", {"format": "marlin-24"}, "format of its quantisation is 'marlin-24'"),
        ("ct_pack_sym", {"config_groups": {"g": []}}, "cannot be read: AttributeError"),
        ("ct_pack_sym", {"config_groups": {}}, "has 0 forms of weights, and one is read"),
        (
            "modelopt_fp8",
            {"quant_algo": "MIXED_PRECISION"},
            "quant_algo of its quantisation is 'MIX",
        ),
        ("gptq_v2", {"quant_method": "awq"}, "these are no blocks of k"),
        ("gptq_v2", {"quant_method": "fp8"}, "no linear has the tensors of that"),
    ],
)
def test_what_the_config_says_otherwise_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())["quantization_config"]
    directory = with_config(FOLDER / name, tmp_path / "m", quantization_config=config | fields)
    assert message in refusal(directory)


def test_codes_in_a_pickle_are_refused(tmp_path: Path) -> None:
    directory = pickled(FOLDER / "gptq_v2", tmp_path / "m")
    assert "codes are read of .safetensors, not pytorch_model.bin" in refusal(directory)


def test_codes_of_which_nothing_is_said_are_refused(tmp_path: Path) -> None:
    directory = with_config(FOLDER / "bnb_nf4", tmp_path / "m", quantization_config=None)
    assert "has quantised weights that nothing dequantises: " in refusal(directory)


def test_a_head_in_codes_that_is_tied_to_a_float_embedding_is_refused(tmp_path: Path) -> None:
    directory = with_weights(FOLDER / "bnb_int8", tmp_path / "m", with_head)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    assert "ties" in refusal(directory)


def test_a_damaged_file_of_modelopt_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(FOLDER / "modelopt_fp8", plain)
    config = plain / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": None}))
    damaged = with_file(plain, tmp_path / "m", "hf_quant_config.json", "{")
    assert "hf_quant_config.json is not JSON" in refusal(damaged)
