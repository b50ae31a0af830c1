"""Weights: every one is the file's, or the model is refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import (
    EMBEDDINGS,
    HEAD,
    UP,
    Q,
    Weights,
    check_loads,
    refusal,
    weights_of,
    with_config,
    with_weights,
)
from support.models.tiny_models import save_model
from transformers import LlamaModel, YoutuConfig, YoutuForCausalLM

from trt_lora.builder.suppress_output import suppress_output


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key not in names}


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


# ------------------------------------------------------------- names and shapes of the weights


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_weight_is_the_files(model: Path, dtype: str) -> None:
    check_loads(model, weights_of(model), dtype)


def test_a_prefix_on_every_name_is_refused(model: Path, tmp_path: Path) -> None:
    message = refusal(with_weights(model, tmp_path / "m", prefixed("module.")))
    assert "21 are missing (lm_head.weight, model.embed_tokens.weight, " in message
    assert "and 18 more)" in message
    assert "21 are unknown to the model (module.lm_head.weight, " in message


def test_a_missing_head_is_refused(model: Path, tmp_path: Path) -> None:
    message = refusal(with_weights(model, tmp_path / "m", without(HEAD)))
    assert "1 are missing (lm_head.weight)" in message
    assert "tie_word_embeddings" in message


def test_a_layer_that_the_file_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    message = refusal(with_config(model, tmp_path / "m", num_hidden_layers=3))
    assert "9 are missing (model.layers.2.input_layernorm.weight, " in message


def test_a_layer_that_the_config_lacks_is_refused(model: Path, tmp_path: Path) -> None:
    message = refusal(with_config(model, tmp_path / "m", num_hidden_layers=1))
    assert "9 are unknown to the model (model.layers.1.input_layernorm.weight, " in message


def test_weights_of_another_shape_are_refused(model: Path, tmp_path: Path) -> None:
    message = refusal(with_config(model, tmp_path / "m", vocab_size=100))
    assert "2 have another shape (lm_head.weight is [97, 32], expected [100, 32], " in message


@pytest.mark.parametrize("twin", ["layers.1.mlp.up_proj.weight", f"model.{UP}"])
def test_two_weights_for_one_of_the_models_are_refused(
    model: Path, tmp_path: Path, twin: str
) -> None:
    change = {twin: weights_of(model)[UP] + 1}
    message = refusal(with_weights(model, tmp_path / "m", lambda weights: weights | change))
    assert f"does not give {UP} the values that " in message


def test_names_with_and_without_the_base_models_prefix_load(tied: Path, tmp_path: Path) -> None:
    """As `LlamaModel.save_pretrained` writes them."""
    expected = weights_of(tied)
    with suppress_output():
        LlamaModel.from_pretrained(tied).save_pretrained(tmp_path / "bare")
    bare = with_config(tmp_path / "bare", tmp_path / "m", architectures=["LlamaForCausalLM"])
    assert "embed_tokens.weight" in weights_of(bare)
    check_loads(bare, expected | {HEAD: expected[EMBEDDINGS]})


def test_a_model_without_a_head_is_refused(model: Path, tmp_path: Path) -> None:
    with suppress_output():
        LlamaModel.from_pretrained(model).save_pretrained(tmp_path / "bare")
    assert "holds LlamaModel, not a causal language model" in refusal(tmp_path / "bare")
    bare = with_config(tmp_path / "bare", tmp_path / "m", architectures=["LlamaForCausalLM"])
    assert "1 are missing (lm_head.weight)" in refusal(bare)


def test_buffers_that_older_releases_saved_are_left_out(model: Path, tmp_path: Path) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}
    directory = with_weights(model, tmp_path / "m", lambda weights: weights | old)
    check_loads(directory, weights_of(model))


def test_masks_that_older_releases_saved_are_left_out(tmp_path: Path) -> None:
    model = save_model("GPT2", tmp_path / "gpt2")
    old = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    directory = with_weights(model, tmp_path / "m", lambda weights: weights | old)
    expected = weights_of(model)
    check_loads(directory, expected | {HEAD: expected["transformer.wte.weight"]})


def test_a_row_that_transformers_clears_is_refused(tmp_path: Path) -> None:
    """It sets the embedding of Youtu's padding token to zero, whatever the file says."""
    with suppress_output():
        model = YoutuForCausalLM(
            YoutuConfig(
                vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                num_attention_heads=4, q_lora_rank=16, kv_lora_rank=16, pad_token_id=0,
            )
        )  # fmt: skip
        model.model.embed_tokens.weight.data[0] = 1
        model.save_pretrained(tmp_path)
    assert f"does not give {EMBEDDINGS} the values that" in refusal(tmp_path)


# --------------------------------------------------------------------------------- tied weights


def test_tied_weights_load_from_one_of_them(tied: Path, tmp_path: Path) -> None:
    weights = weights_of(tied)
    assert HEAD not in weights
    both = weights | {HEAD: weights[EMBEDDINGS]}
    check_loads(tied, both)
    swapped = without(EMBEDDINGS)(both)
    check_loads(with_weights(tied, tmp_path / "m", lambda _: swapped), both)


def test_tied_weights_load_from_two_that_are_equal(tied: Path, tmp_path: Path) -> None:
    weights = weights_of(tied)
    both = weights | {HEAD: weights[EMBEDDINGS].clone()}
    check_loads(with_weights(tied, tmp_path / "m", lambda _: both), both)


def test_weights_that_the_config_ties_and_the_file_does_not_are_refused(
    model: Path, tmp_path: Path
) -> None:
    message = refusal(with_config(model, tmp_path / "m", tie_word_embeddings=True))
    assert f"config.json ties {HEAD} and {EMBEDDINGS}, but" in message
    assert "set tie_word_embeddings to false" in message


def test_weights_that_the_file_ties_and_the_config_does_not_are_refused(
    tied: Path, tmp_path: Path
) -> None:
    message = refusal(with_config(tied, tmp_path / "m", tie_word_embeddings=False))
    assert f"1 are missing ({HEAD})" in message


# ------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (Q, float("nan"), "has NaN values: the model is damaged"),
        ("model.norm.weight", float("nan"), "has NaN values: the model is damaged"),
        (UP, float("inf"), "has infinite values in"),
        (EMBEDDINGS, float("-inf"), "has infinite values in"),
    ],
)
def test_a_weight_that_is_not_finite_is_refused(
    model: Path, tmp_path: Path, name: str, value: float, message: str, dtype: str
) -> None:
    directory = with_weights(model, tmp_path / "m", lambda weights: changed(weights, name, value))
    assert f"{name} {message}" in refusal(directory, dtype)


def test_a_weight_that_overflows_is_refused_in_that_dtype_alone(
    model: Path, tmp_path: Path
) -> None:
    directory = with_weights(model, tmp_path / "m", lambda weights: changed(weights, Q, 1e6))
    message = refusal(directory, "float16")
    assert f"{Q} has infinite values in float16, whose largest is 65504" in message
    assert "--dtype bfloat16 or float32" in message
    check_loads(directory, weights_of(directory), "bfloat16")


def changed(weights: Weights, name: str, value: float) -> Weights:
    weights[name].view(-1)[-1] = value
    return weights
