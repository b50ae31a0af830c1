"""The base model: every weight is the file's, or the model is refused by name and on one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    INDEX_FILE,
    POINTER,
    WEIGHTS_FILE,
    Weights,
    halves,
    in_hub_cache,
    weights_of,
    with_config,
    with_file,
    with_shards,
    with_weights,
)
from tiny import save_adapter, save_model
from transformers import LlamaModel, YoutuConfig, YoutuForCausalLM

from trt_lora.builder.base_model import describe, fingerprint, load_model, read_config
from trt_lora.builder.quiet import quiet
from trt_lora.plugins.errors import ModelError

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose head is not tied."""
    return save_model("Llama", tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one weight for the embeddings and the head."""
    directory = tmp_path_factory.mktemp("tied") / "model"
    return save_model("Llama", directory, tie_word_embeddings=True)


def refusal(directory: Path, dtype: str = "float32") -> str:
    """Read and load a model as a build does, which must fail; return its message, of one line."""
    with pytest.raises(ModelError) as raised:
        load(directory, dtype)
    message = str(raised.value)
    assert "\n" not in message
    return message


def load(directory: Path, dtype: str) -> Any:
    read_config(directory)
    return load_model(directory, dtype)


def check_loads(directory: Path, expected: Weights, dtype: str = "float32") -> None:
    """Load a model; its weights must be `expected`, bit by bit."""
    loaded = load(directory, dtype).state_dict()
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded[name], weight.to(getattr(torch, dtype))), name


# ------------------------------------------------------------- names and shapes of the weights


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key not in names}


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


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
    with quiet():
        LlamaModel.from_pretrained(tied).save_pretrained(tmp_path / "bare")
    bare = with_config(tmp_path / "bare", tmp_path / "m", architectures=["LlamaForCausalLM"])
    assert "embed_tokens.weight" in weights_of(bare)
    check_loads(bare, expected | {HEAD: expected[EMBEDDINGS]})


def test_a_model_without_a_head_is_refused(model: Path, tmp_path: Path) -> None:
    with quiet():
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
    with quiet():
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
        (NORM, float("nan"), "has NaN values: the model is damaged"),
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


# ------------------------------------------------------------------ adapters and quantisation


def test_an_adapter_beside_the_weights_is_refused(model: Path, tmp_path: Path) -> None:
    """Transformers merges it into the weights of the model."""
    directory = save_adapter(model, tmp_path / "m", r=2)
    assert "has an adapter_config.json" in refusal(directory)  # of an adapter alone, too
    shutil.copytree(model, directory, dirs_exist_ok=True)
    message = refusal(directory)
    assert "has an adapter_config.json" in message
    assert "load the adapter at run time" in message


@pytest.mark.parametrize(
    "method",
    ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "torchao", "no-such"],
)
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantised_model_is_refused_by_its_config(
    model: Path, tmp_path: Path, method: str, field: str
) -> None:
    directory = with_config(model, tmp_path / "m", **{field: {"quant_method": method, "bits": 4}})
    with pytest.raises(ModelError, match=f"are quantised by {method}, which nothing here"):
        read_config(directory)


def test_an_absent_quantisation_is_none(model: Path, tmp_path: Path) -> None:
    read_config(with_config(model, tmp_path / "m", quantization_config=None))


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float8_e4m3fn, {"weight_scale": torch.ones(1)}),
        (torch.float8_e4m3fn, {}),
        (torch.float8_e5m2, {}),
        (torch.int8, {"SCB": torch.ones(32)}),
        (torch.int8, {}),
        (torch.uint8, {}),
    ],
)
def test_quantised_weights_without_a_config_are_refused(
    model: Path, tmp_path: Path, dtype: torch.dtype, scales: Weights
) -> None:
    path = Q.removesuffix("weight")
    extra = {path + name: scale for name, scale in scales.items()}
    directory = with_weights(
        model, tmp_path / "m", lambda weights: weights | {Q: weights[Q].to(dtype)} | extra
    )
    message = refusal(directory)
    assert "has quantised weights that nothing dequantises: " in message
    assert Q in message


# ---------------------------------------------------------------------- the files of the weights


def test_shards_load(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    check_loads(directory, weights_of(model))
    assert fingerprint(directory) == fingerprint(model)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_checkpoint_loads(model: Path, tmp_path: Path, zipped: bool) -> None:
    directory = pickled(model, tmp_path / "m")
    torch.save(
        weights_of(model),
        directory / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    check_loads(directory, weights_of(model))


def test_pickled_shards_load(model: Path, tmp_path: Path) -> None:
    directory = pickled(model, tmp_path / "m")
    (directory / "pytorch_model.bin").unlink()
    homes: dict[str, str] = {}
    for number, weights in enumerate(halves(model).values()):
        torch.save(weights, directory / f"part{number}.bin")
        homes |= dict.fromkeys(weights, f"part{number}.bin")
    index = {"metadata": {}, "weight_map": homes}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_loads(directory, weights_of(model))


def test_weights_that_are_not_loaded_do_not_count_in_the_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    data = (model / WEIGHTS_FILE).read_bytes()
    directory = with_file(model, tmp_path / "m", "consolidated.safetensors", data)
    assert fingerprint(directory) == fingerprint(model)


def test_missing_shards_are_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    (directory / "model-00002-of-00002.safetensors").unlink()
    message = refusal(directory)
    assert "names 1 files that are not there: model-00002-of-00002.safetensors" in message


def test_a_shard_that_the_index_does_not_name_is_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    index = json.loads((directory / INDEX_FILE).read_text())
    first = {k: v for k, v in index["weight_map"].items() if "00001" in v}
    (directory / INDEX_FILE).write_text(json.dumps(index | {"weight_map": first}))
    assert "are missing (" in refusal(directory)


def test_a_weight_of_two_values_in_two_shards_is_refused(model: Path, tmp_path: Path) -> None:
    shards = halves(model)
    first, second = shards.values()
    name = next(iter(first))
    directory = with_shards(model, tmp_path / "m", shards)
    assert fingerprint(directory)
    second[name] = first[name] + 1
    shutil.rmtree(directory)
    assert f"does not give {name} the values that" in refusal(with_shards(model, directory, shards))


def test_two_sets_of_weights_are_refused(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    shutil.copyfile(model / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    assert "two sets of weights, model.safetensors and the shards of" in refusal(directory)


def test_an_index_that_is_left_over_is_not_read(model: Path, tmp_path: Path) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    for shard in directory.glob("model-*"):
        shard.unlink()
    shutil.copyfile(model / WEIGHTS_FILE, directory / WEIGHTS_FILE)
    check_loads(directory, weights_of(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a list, not an object"),
        ("{", "is not JSON"),
        ("{}", "weight_map is None, expected the file of every weight"),
        ('{"weight_map": {"a": 1}}', "weight_map is {'a': 1}, expected the file"),
        ('{"weight_map": {"a": "a.safetensors"}}', "1 files that are not there: a.safetensors"),
        (POINTER, "is a Git LFS pointer"),
    ],
)
def test_a_damaged_index_is_refused(
    model: Path, tmp_path: Path, content: str, message: str
) -> None:
    directory = with_file(model, tmp_path / "m", INDEX_FILE, content)
    (directory / WEIGHTS_FILE).unlink()
    assert message in refusal(directory)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "pointer"])
def test_damaged_weights_are_refused(model: Path, tmp_path: Path, name: str, damage: str) -> None:
    directory = tmp_path / "m"
    shutil.copytree(model, directory) if name == WEIGHTS_FILE else pickled(model, directory)
    data = (directory / name).read_bytes()
    content, message = {
        "cut": (data[: len(data) // 2], "is damaged or no ."),
        "empty": (b"", "is empty"),
        "noise": (b"\x80\x04 no weights" * 9, "is damaged or no ."),
        "pointer": (POINTER.encode(), "is a Git LFS pointer, not the file itself; run `git lfs"),
    }[damage]
    (directory / name).write_bytes(content)
    assert f"{name} {message}" in refusal(directory)


def test_a_pickle_that_holds_no_weights_is_refused(model: Path, tmp_path: Path) -> None:
    directory = pickled(model, tmp_path / "m")
    torch.save({"state_dict": weights_of(model)}, directory / "pytorch_model.bin")
    assert "pytorch_model.bin is damaged or no .bin file" in refusal(directory)


def test_weights_under_other_names_are_listed(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(model, directory)
    (directory / WEIGHTS_FILE).rename(directory / "model.fp16.safetensors")
    message = refusal(directory)
    assert "no model.safetensors or pytorch_model.bin" in message
    assert "only model.fp16.safetensors" in message


def pickled(model: Path, directory: Path) -> Path:
    shutil.copytree(model, directory)
    torch.save(weights_of(directory), directory / "pytorch_model.bin")
    (directory / WEIGHTS_FILE).unlink()
    return directory


# ------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "foo"}, "hidden_act is 'foo', an activation that transformers does not"),
        ({"rope_parameters": {"rope_type": "foo"}}, "rope_type is 'foo'; transformers has"),
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope_type is 'foo'; transformers has"),
        ({"rope_scaling": {"factor": 8.0}}, "has the factor 8.0 and no rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor is 'x', expected a"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "Missing required keys"),
        ({"rope_parameters": [1]}, "'rope_parameters'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, expected a number above 0"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x', expected a number above"),
        ({"model_type": "foo"}, "model_type is 'foo', which transformers"),
        ({"model_type": None}, "model_type is None, which transformers"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], which transformers"),
        (
            {"model_type": "foo", "auto_map": {"AutoConfig": "a.B"}},
            "code that a model brings along (auto_map) is never run",
        ),
        (
            {"architectures": ["MistralForCausalLM"]},
            "not a causal language model of model_type llama; expected LlamaForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, "not a causal language model"),
        ({"architectures": [1]}, "holds 1, not a causal language model"),
        ({"architectures": None}, "holds a model without architectures"),
        ({"num_hidden_layers": "2"}, "Field 'num_hidden_layers' expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": -32}, "negative dimension"),
        ({"dtype": "foo"}, "has no attribute 'foo'"),
        ({"transformers_weights": "a.safetensors"}, "transformers_weights is 'a.safetensors'"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"text_config": 3}, "config.json is not what transformers expects: "),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    model: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(with_config(model, tmp_path / "m", **fields))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not JSON: "),
        (b"\xff\xfe", "config.json is not JSON: "),
        ("[]", "config.json holds a list, not an object; correct it, or download"),
        ("", "config.json is empty; download"),
        (POINTER, "config.json is a Git LFS pointer"),
    ],
)
def test_a_damaged_config_is_refused(
    model: Path, tmp_path: Path, content: str | bytes, message: str
) -> None:
    assert message in refusal(with_file(model, tmp_path / "m", "config.json", content))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2},
        {"rope_type": "default", "factor": 1.0},
        {"type": "dynamic", "factor": 2.0},
        None,
    ],
)
def test_rotary_embeddings_that_transformers_has_are_taken(
    model: Path, tmp_path: Path, rope: dict[str, Any] | None
) -> None:
    read_config(with_config(model, tmp_path / "m", rope_parameters=None, rope_scaling=rope))


# ---------------------------------------------------------- generation_config.json, tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "generation_config.json is not JSON: "),
        ("[]", "generation_config.json holds a list, not an object"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x', expected a token or a list of tokens"),
        ('{"eos_token_id": [2, "x"]}', "eos_token_id is [2, 'x'], expected a token or a list"),
        ('{"eos_token_id": true}', "eos_token_id is True, expected a token or a list of tokens"),
        ('{"eos_token_id": 2.0}', "eos_token_id is 2.0, expected a token or a list of tokens"),
        ('{"pad_token_id": [0]}', "pad_token_id is [0], expected a token"),
        (POINTER, "generation_config.json is a Git LFS pointer"),
    ],
)
def test_a_malformed_generation_config_is_refused_before_the_weights_are_read(
    model: Path, tmp_path: Path, content: str, message: str
) -> None:
    directory = with_file(model, tmp_path / "m", "generation_config.json", content)
    with pytest.raises(ModelError) as raised:
        read_config(directory)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("generation", "stops", "pad"),
    [
        ({"eos_token_id": [2, 5], "pad_token_id": 7}, (2, 5), 7),
        ({"eos_token_id": [5, 2]}, (5, 2), 0),  # the config's
        ({"eos_token_id": 5, "pad_token_id": -1}, (5,), 5),
        ({"eos_token_id": -1, "pad_token_id": 97}, (), 0),  # the vocabulary ends at 96
        ({"eos_token_id": None, "pad_token_id": None}, (), 0),
    ],
)
def test_stop_and_pad_tokens_are_those_that_the_model_can_read(
    model: Path, tmp_path: Path, generation: dict[str, Any], stops: tuple[int, ...], pad: int
) -> None:
    content = json.dumps(generation)
    directory = with_file(model, tmp_path / "m", "generation_config.json", content)
    base = describe(directory, read_config(directory))
    assert (base.stop_token_ids, base.pad_token_id) == (stops, pad)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_was_not_downloaded_is_refused(
    model: Path, tmp_path: Path, name: str
) -> None:
    message = refusal(with_file(model, tmp_path / "m", name, POINTER))
    assert f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`" in message


# ----------------------------------------------------------------------------------- the path


def test_a_path_that_is_no_directory_says_what_to_pass(model: Path, tmp_path: Path) -> None:
    assert f"is not a directory. Pass {model}" in refusal(model / WEIGHTS_FILE)
    lone = tmp_path / "model.gguf"
    lone.write_bytes(b"GGUF")
    assert "is not a directory. Pass the folder that save_pretrained wrote" in refusal(lone)


def test_a_model_in_the_hubs_cache_is_the_same_model(model: Path, tmp_path: Path) -> None:
    snapshot = in_hub_cache(model, tmp_path, "org/name")
    (tmp_path / "link").symlink_to(snapshot)
    expected = describe(model, read_config(model))
    for directory in (snapshot, tmp_path / "link"):
        check_loads(directory, weights_of(model))
        found = describe(directory, read_config(directory))
        assert (found.name, found.fingerprint) == ("org/name", expected.fingerprint)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS_FILE])
def test_a_link_that_leads_nowhere_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    snapshot = in_hub_cache(model, tmp_path, "org/name")
    (snapshot / name).resolve().unlink()
    assert f"{name} cannot be read: No such file or directory; download" in refusal(snapshot)


def test_a_linked_model_is_called_as_the_folder_that_it_leads_to(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(model)
    assert describe(tmp_path / "link", read_config(model)).name == model.name


def test_a_path_that_does_not_exist_says_what_to_pass(tmp_path: Path) -> None:
    assert "does not exist. Pass the folder that" in refusal(tmp_path / "no")
    message = refusal(Path("org/no-such-name"))
    assert "hf download org/no-such-name --local-dir no-such-name" in message


def test_a_path_that_cannot_be_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be read: File name too long" in refusal(Path("x" * 300))
    assert "cannot be read: embedded null byte" in refusal(Path("a\0b"))

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(Path, "open", denied)
    assert ".json cannot be read: Permission denied; download" in refusal(model)
    monkeypatch.setattr("os.listdir", denied)
    assert f"{model} cannot be read: Permission denied" in refusal(model)


def test_a_directory_above_the_model_says_what_to_pass(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "hub" / "snapshots" / "0f3a")
    message = refusal(tmp_path / "hub")
    assert "has no config.json: it is not a model directory" in message
    assert message.endswith(f"Pass {tmp_path / 'hub' / 'snapshots' / '0f3a'}")
