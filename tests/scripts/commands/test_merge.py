"""`trt-lora merge`: what no engine takes becomes a base model that answers as PEFT does."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import KasaConfig
from safetensors.torch import load_file, save_file
from support.adapters.peft_fields import CONFIG, WEIGHTS, prompt
from support.commands import trt_lora
from support.models.quantised import ADAPTER
from support.models.quantised import FOLDER as QUANTISED
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.runtime import LoRAManager, TensorMap, open_engine, read_manifest
from trt_lora.runtime.engines.topk import Logits
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

Q = ["q_proj"]


@dataclass(frozen=True)
class Kind:
    """An adapter of one kind, and the model it is for."""

    options: dict[str, Any]
    model: str = "Llama"


KINDS = {
    "plain": Kind({"use_rslora": True, "rank_pattern": {"v_proj": 3}}),
    "DoRA": Kind({"use_dora": True}),
    "bias": Kind({"bias": "all"}, "GPT2"),
    "bias beside B": Kind({"lora_bias": True}, "GPT2"),
    "whole head": Kind({"modules_to_save": ["lm_head"], "target_modules": Q}, "tied"),
    "whole norms": Kind({"modules_to_save": ["norm"], "target_modules": Q}),
    "tokens": Kind({"trainable_token_indices": [1, 5], "target_modules": Q}, "tied"),
    "parameters": Kind({"target_parameters": ["up_proj.weight"], "target_modules": Q}),
    "KaSA": Kind({"kasa_config": KasaConfig()}),
    "repeated layers": Kind({"layer_replication": [(0, 2), (0, 2)], "target_modules": Q}),
    "embedding": Kind({"target_modules": ["q_proj", "embed_tokens"]}, "tied"),
    "head": Kind({"target_modules": ["q_proj", "lm_head"]}, "tied"),
    "head of its own": Kind({"target_modules": ["q_proj", "lm_head"]}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "Llama": save_model("Llama", folder / "Llama"),
        "tied": save_model("Llama", folder / "tied", tie_word_embeddings=True),
        "GPT2": save_model("GPT2", folder / "GPT2"),
    }


def trained(model: Path, directory: Path, **options: Any) -> Path:
    """An adapter all of whose tensors are other than before training, copies of the base not."""
    save_adapter(model, directory, **options)
    tensors = load_file(directory / WEIGHTS)
    torch.manual_seed(1)
    for name in tensors:
        if "lora_A" not in name and "lora_B.weight" not in name and ".base_layer." not in name:
            tensors[name] = tensors[name] + 0.1 * torch.randn_like(tensors[name])
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return directory


def in_transformers(model: Path, vocabulary: int = VOCABULARY, **adapters: Path) -> Logits:
    """Logits of every token that is no padding, with the adapter, if there is one."""
    ids, mask = prompt()
    ids %= vocabulary
    found = PeftReference(model, adapters).logits(next(iter(adapters), ""), ids, mask)
    return np.asarray(found[mask.astype(bool)])


def error_of(ours: Logits, theirs: Logits) -> float:
    return float(np.abs(ours - theirs).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_answers_as_peft_does(
    kind: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = models[KINDS[kind].model]
    adapter = trained(model, tmp_path / "a", **KINDS[kind].options)
    out = tmp_path / "out"
    printed = trt_lora(capsys, "merge", "--model", model, "--adapter", adapter, out)
    assert f"{out}: {adapter} merged into {model}" in printed
    expected = in_transformers(model, a=adapter)
    assert error_of(in_transformers(out), expected) < 1e-5
    assert error_of(in_transformers(model), expected) > 0.05
    load_model(
        Checkpoint(out), "float32"
    )  # as a build does, which compares ties and values with the files
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_merged_model_of_a_quantised_one_is_floats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVFP4, whose file of its own stays behind; scales in FP8 and float32 beside floats."""
    model, out = QUANTISED / "modelopt_nvfp4", tmp_path / "out"
    trt_lora(capsys, "merge", "--model", model, "--adapter", ADAPTER, out)
    assert not (out / "hf_quant_config.json").exists()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged, expected = in_transformers(out, 32), in_transformers(model, 32, a=ADAPTER)
    assert error_of(merged, expected) < 1e-5
    assert error_of(in_transformers(model, 32), expected) > 0.5


@pytest.mark.slow
def test_an_engine_of_a_merged_model_answers_as_peft_does(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(models["tied"], tmp_path / "m")
    Tokenizer(WordLevel({"a": 3}, "a")).save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [4, 5]}')
    adapter = trained(model, tmp_path / "a", use_dora=True)
    out = tmp_path / "out"
    trt_lora(capsys, "merge", "--model", model, "--adapter", adapter, out)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    quick_build(tiny_config(out, tmp_path / "e"))
    manifest = read_manifest(tmp_path / "e")
    assert (manifest.base_model.name, manifest.base_model.stop_token_ids) == ("out", (4, 5))
    with open_engine(tmp_path / "e") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        bindings = TensorMap()
        manager.refresh_tensor_map(bindings)
        ids, mask = prompt()
        rows = [row[seen.astype(bool)].tolist() for row, seen in zip(ids, mask, strict=True)]
        ours = np.concatenate(forced_logits(engine, bindings, rows, decoded=0))
    assert error_of(ours, in_transformers(model, a=adapter)) < 1e-4


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], torch.bfloat16), (["--dtype", "float32"], torch.float32)],
    ids=["as stored", "wider"],
)
def test_weights_keep_the_dtype_of_the_checkpoint_unless_told_otherwise(
    options: list[str],
    expected: torch.dtype,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(models["Llama"], tmp_path / "m")
    weights = load_file(model / "model.safetensors")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(rounded, model / "model.safetensors", {"format": "pt"})
    adapter = trained(model, tmp_path / "a")
    words = ["--model", model, "--adapter", adapter, tmp_path / "out", "--json", *options]
    found = json.loads(trt_lora(capsys, "merge", *map(str, words)))
    assert {w.dtype for w in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        expected
    }
    assert found["dtype"] == str(expected).removeprefix("torch.")
    assert found["output"] == str(tmp_path / "out")
    assert found["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def not_there(adapter: Path) -> None:
    shutil.rmtree(adapter)


def of_another_format(adapter: Path) -> None:
    (adapter / CONFIG).unlink()


def incomplete(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn" not in name}
    save_file(kept, adapter / WEIGHTS, {"format": "pt"})


def not_finite(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] * np.nan}, adapter / WEIGHTS, {"format": "pt"})


def of_another_base(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    wide = {name: torch.cat([w, w], 1) if "_A" in name else w for name, w in tensors.items()}
    save_file(wide, adapter / WEIGHTS, {"format": "pt"})


def with_biases(adapter: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"lora_bias": True}))
    tensors = load_file(adapter / WEIGHTS)
    more = {
        name.replace(".weight", ".bias"): torch.ones(len(b))
        for name, b in tensors.items()
        if "lora_B" in name
    }
    save_file(tensors | more, adapter / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (not_there, "a has no adapter_config.json: it is not a PEFT adapter directory"),
        (of_another_format, "a has no adapter_config.json: it is not a PEFT adapter directory"),
        (incomplete, "lacks 4 tensors that its config asks for, such as 'base_model.model.model."),
        (not_finite, "NaNs detected in the merged weights"),
        (of_another_base, "size mismatch for base_model.model.model.layers.0"),
        (with_biases, "`lora_bias=True` because the base layer has no bias"),
    ],
)
def test_what_peft_cannot_merge_is_said_in_one_line_and_leaves_nothing(
    damage: Any,
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = save_adapter(models["Llama"], tmp_path / "a", target_modules=["q_proj", "v_proj"])
    damage(adapter)
    words = ["--model", models["Llama"], "--adapter", adapter, tmp_path / "out"]
    *_, line = trt_lora(capsys, "merge", *map(str, words), expected=2).splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert str(adapter) in line
    assert {path.name for path in tmp_path.iterdir()} <= {"a"}


def test_an_output_that_exists_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", models["Llama"], "--adapter", tmp_path, tmp_path]
    printed = trt_lora(capsys, "merge", *map(str, words), expected=2)
    assert printed == f"error: {tmp_path} exists; choose another place\n"
