"""What is passed as a model, its config and its small files: taken, or refused on one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import (
    POINTER,
    WEIGHTS_FILE,
    check_loads,
    in_hub_cache,
    open_checkpoint,
    refusal,
    weights_of,
    with_config,
    with_file,
)
from support.models.tiny_models import save_adapter

from trt_lora.builder.checkpoint.base_model import describe
from trt_lora.plugins.errors import ModelError

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
    open_checkpoint(with_config(model, tmp_path / "m", rope_parameters=None, rope_scaling=rope))


@pytest.mark.parametrize("method", ["mxfp4", "torchao", "no-such"])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_codes_that_are_not_read_are_refused_by_the_config(
    model: Path, tmp_path: Path, method: str, field: str
) -> None:
    directory = with_config(model, tmp_path / "m", **{field: {"quant_method": method, "bits": 4}})
    with pytest.raises(ModelError, match=f"quantised by {method}, and codes are read of awq, bits"):
        open_checkpoint(directory)


def test_an_absent_quantisation_is_none(model: Path, tmp_path: Path) -> None:
    open_checkpoint(with_config(model, tmp_path / "m", quantization_config=None))


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
        open_checkpoint(directory)
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
    base = describe(*open_checkpoint(directory))
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
    expected = describe(*open_checkpoint(model))
    for directory in (snapshot, tmp_path / "link"):
        check_loads(directory, weights_of(model))
        found = describe(*open_checkpoint(directory))
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
    assert describe(*open_checkpoint(tmp_path / "link")).name == model.name


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


def test_an_adapter_beside_the_weights_is_refused(model: Path, tmp_path: Path) -> None:
    """Transformers makes it part of the model."""
    directory = save_adapter(model, tmp_path / "m", r=2)
    assert "has an adapter_config.json" in refusal(directory)  # of an adapter alone, too
    shutil.copytree(model, directory, dirs_exist_ok=True)
    message = refusal(directory)
    assert "has an adapter_config.json" in message
    assert "load the adapter at run time" in message


def test_a_misspelled_directory_gets_the_model_beside_it_that_may_be_meant(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "smollm2")
    (tmp_path / "smollm4").mkdir()  # no model
    message = refusal(tmp_path / "smollm3")
    assert message == f"{tmp_path / 'smollm3'} does not exist; did you mean 'smollm2'?"
    assert "did you mean" not in refusal(tmp_path / "qwen")
