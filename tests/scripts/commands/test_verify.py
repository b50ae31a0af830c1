"""`trt-lora verify` passes what is right and catches every mistake that we could think of."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config
from support.spoken_engine import spoken_engine

from trt_lora.builder.passes.codes import coded_weight
from trt_lora.builder.passes.codes.coded_weight import unpacked
from trt_lora.runtime import open_engine
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.weight import Pair
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store import source
from trt_lora.scripts.commands import verify
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK, ALPHA = 4, 12
FIELDS = {"num_hidden_layers": 4, "num_key_value_heads": 4}  # as in test_bisect.py
Q, K = ("model.layers.{}.self_attn." + name for name in ("q_proj", "k_proj"))


@dataclass(frozen=True)
class Made:
    """A model whose attention is square, so that its factors can be exchanged; its engine."""

    model: Path
    engine: Path
    adapter: Path  # rsLoRA, so that it and alpha can be ignored


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("verify")
    model = save_model("Llama", folder / "model", **FIELDS)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = save_adapter(
        model, folder / "a", r=RANK, lora_alpha=ALPHA, use_rslora=True, target_modules=targets
    )
    quick_build(tiny_config(model, folder / "engine"))
    return Made(model, folder / "engine", adapter)


def tensors(made: Made) -> dict[str, Array]:
    return load_file(made.adapter / WEIGHTS)


def with_tensors(made: Made, tensors: dict[str, Array], directory: Path) -> Made:
    """The adapter's config with other tensors."""
    (directory / CONFIG).write_bytes((made.adapter / CONFIG).read_bytes())
    save_file(tensors, directory / WEIGHTS)
    return replace(made, adapter=directory)


def exit_code(made: Made, *options: str, model: Path | None = None) -> int:
    where = [str(made.engine), "--model", str(model or made.model), "--adapter", str(made.adapter)]
    try:
        main(["verify", *where, *options])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@pytest.mark.slow
def test_an_engine_that_computes_what_peft_does_passes(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(made) == 0
    printed, stages = capsys.readouterr()
    turns = [f"prompt {n} of 3 with {name}" for n in (1, 2, 3) for name in ("(base)", "adapter")]
    known = ["adapter", "reference", "logits", *turns, "deltas"]
    assert stages.splitlines()[-len(known) :] == known
    assert printed.count("(base)") == printed.count("adapter  ") - 1 == len(verify.PROMPTS)
    assert "same best token" in printed
    assert "self_attn.k_proj" in printed
    assert "the engine computes what PEFT does" in printed
    assert printed.endswith("; it ran on ONNX Runtime (CPU)\n")


# ------------------------------------------------------------------------------- planted mistakes


def without_alpha(adapter: Adapter) -> Adapter:
    weights = {name: replace(weight, scale=1.0) for name, weight in adapter.weights.items()}
    return replace(adapter, weights=weights)


def without_rslora(adapter: Adapter) -> Adapter:
    scales = {1.0: 1.0, ALPHA / RANK**0.5: ALPHA / RANK}
    weights = {n: replace(w, scale=scales[w.scale]) for n, w in adapter.weights.items()}
    return replace(adapter, weights=weights)


def with_factors_swapped(adapter: Adapter) -> Adapter:
    def swapped(pair: Pair) -> Pair:
        return pair[1].transposed(), pair[0].transposed()

    pairs = {path: swapped(pair) for path, pair in adapter.pairs().items()}
    return Adapter.of_pairs(adapter.source, pairs)


def without_a_layer(adapter: Adapter) -> Adapter:
    kept = {path: pair for path, pair in adapter.pairs().items() if ".layers.1." not in path}
    return replace(adapter, weights=Adapter.of_pairs("", kept).weights)


def with_q_and_k_exchanged(adapter: Adapter) -> Adapter:
    pairs = adapter.pairs()
    for layer in (0, 1):
        q, k = Q.format(layer), K.format(layer)
        pairs[q], pairs[k] = pairs[k], pairs[q]
    return Adapter.of_pairs(adapter.source, pairs)


def without_a_delta(adapter: Adapter) -> Adapter:
    weights = {name: replace(weight, scale=0.0) for name, weight in adapter.weights.items()}
    return replace(adapter, weights=weights)


def plant(mistake: Callable[[Adapter], Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store read adapters with a mistake."""

    def wrong(path: Path, manifest: object) -> Adapter:
        return mistake(load_adapter(path))

    monkeypatch.setattr(source, "load_adapter", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (without_alpha, Q.format(0)),
        (without_rslora, Q.format(0)),
        (with_factors_swapped, Q.format(0)),
        (without_a_layer, Q.format(1)),
        (with_q_and_k_exchanged, K.format(0)),
    ],
)
def test_a_mistake_of_the_loader_is_caught_and_its_site_named(
    made: Made,
    mistake: Callable[[Adapter], Adapter],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(mistake, monkeypatch)
    assert exit_code(made) == 1
    errors = capsys.readouterr().err
    assert f"the delta of {named} is off by" in errors
    assert "a logit of" in errors
    assert "with (base) is off" not in errors  # the base model is right


@pytest.mark.slow
def test_another_base_model_of_the_same_shapes_is_caught(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model("Llama", tmp_path / "other", seed=7, **FIELDS)
    assert exit_code(made, model=other) == 1
    assert "with (base) is off by" in capsys.readouterr().err


@pytest.mark.slow
def test_another_base_model_with_another_config_is_caught_by_its_fingerprint(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_model("Llama", tmp_path / "other", rope_theta=5e5, **FIELDS)
    assert exit_code(made, model=other) == 1
    assert "is not what the engine was built from" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_lacks_a_targeted_layer_is_caught(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {name: value for name, value in tensors(made).items() if ".layers.1." not in name}
    assert exit_code(with_tensors(made, kept, tmp_path)) == 1  # PEFT takes it without a word
    assert f"{Q.format(1)} is targeted, but has no tensors" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- options


@pytest.mark.slow
def test_a_tolerance_of_nothing_is_exceeded(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(made, "--tolerance", "0") == 1
    assert "beyond the tolerance of 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("tolerance", ["inf", "nan", "-1"])
def test_a_tolerance_that_proves_nothing_is_refused(
    made: Made, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    assert exit_code(made, f"--tolerance={tolerance}") == 2
    assert "expected a finite number from 0" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_that_adds_nothing_proves_nothing(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zeros = {name: t * 0 if "lora_B" in name else t for name, t in tensors(made).items()}
    assert exit_code(with_tensors(made, zeros, tmp_path), "--json") == 1
    printed = capsys.readouterr()
    assert "the adapter adds nothing at any site" in printed.err
    found = json.loads(printed.out)
    assert found["same"] is False
    assert found["problems"][0].startswith("the adapter adds nothing at any site")
    assert [row["adapter"] for row in found["logits"]] == ["", "adapter"] * len(verify.PROMPTS)
    assert found["delta_errors"][Q.format(0)] == 0


@pytest.mark.slow
def test_an_engine_that_applies_no_adapter_is_caught(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(without_a_delta, monkeypatch)
    assert exit_code(made) == 1
    errors = capsys.readouterr().err
    assert "with adapter is off by" in errors
    assert "the adapter adds nothing at any site" in errors


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1e9, np.nan])
def test_logits_that_differ_are_caught(
    made: Made, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(self: PeftReference, name: str, ids: Array, mask: Array) -> Array:
        return np.full((*ids.shape, VOCABULARY), wrong, np.float32)

    monkeypatch.setattr(PeftReference, "logits", logits)
    assert exit_code(made, "--max-tokens", "2") == 1


def test_a_model_that_is_no_directory_is_refused(made: Made, tmp_path: Path) -> None:
    assert exit_code(made, model=tmp_path / "nowhere") == 2


def test_prompts_that_are_no_text_are_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, prompts = spoken_engine(made.engine, tmp_path / "engine"), tmp_path / "prompts"
    prompts.write_bytes(b"caf\xe9\n")
    assert exit_code(replace(made, engine=engine), "--prompts", str(prompts)) == 2
    assert f"{prompts} cannot be read: " in capsys.readouterr().err


# ------------------------------------------------------------------------------ weights in codes


@pytest.fixture(scope="module")
def coded(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model in codes of 4 bits, its products exact; the embedding reads the head's."""
    folder = tmp_path_factory.mktemp("coded")
    model = save_model("Llama", folder / "model", tie_word_embeddings=True)
    adapter, engine = save_adapter(model, folder / "adapter"), folder / "engine"
    options = {"quantize": "int4", "quantize_block": 16, "quantize_level": "exact"}
    quick_build(tiny_config(model, engine, **options))
    return replace(made, model=model, adapter=adapter, engine=engine)


@pytest.mark.slow
def test_an_engine_in_codes_is_compared_with_peft_on_its_own_weights(
    coded: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(coded) == 0
    assert "the engine computes what PEFT does: " in capsys.readouterr().out


@pytest.mark.slow
def test_codes_that_are_read_in_another_order_are_caught(
    coded: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coded_weight, "unpacked", lambda both: unpacked(both >> 4 | both << 4))
    assert exit_code(coded) == 1
    assert "beyond the tolerance of 0.001" in capsys.readouterr().err


@pytest.mark.slow
def test_products_with_x_in_8_bits_have_a_tolerance_of_their_own(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"quantize": "int8", "quantize_block": 16}
    quick_build(tiny_config(made.model, tmp_path / "engine", **options))
    fast = replace(made, engine=tmp_path / "engine")
    assert exit_code(fast) == 0
    said = "the engine computes what PEFT does, to 6 of a logit, since it takes x in 8 bits: "
    assert said in capsys.readouterr().out
    assert exit_code(fast, "--tolerance", "1e-3") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "codes"])
def test_the_distance_from_the_float_model_is_reported(
    kind: str, made: Made, coded: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    of = coded if kind == "codes" else made
    assert exit_code(of, "--reference", "float") == 0
    printed = capsys.readouterr().out
    assert "same best token" in printed
    assert "the engine beside its float model: " in printed
    assert exit_code(of, "--reference", "float", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["accuracy"]
    assert [row["adapter"] for row in rows] == ["", verify.ADAPTER]
    for row in rows:
        if kind == "codes":
            assert 1e-6 < row["divergence"] < 1
            assert row["perplexity"] != pytest.approx(row["float_perplexity"], rel=1e-5)
        else:
            assert abs(row["divergence"]) < 1e-9
            assert row["same_best"] == 1
            assert row["perplexity"] == pytest.approx(row["float_perplexity"], rel=1e-5)


@pytest.mark.slow
def test_perplexity_and_divergence_are_those_of_the_definition(
    coded: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, text = spoken_engine(coded.engine, tmp_path / "engine"), tmp_path / "text"
    text.write_text("a b c d e f g h")
    spoken = replace(coded, engine=engine)
    options = ("--reference", "float", "--text", str(text), "--json")
    assert exit_code(spoken, *options) == 0
    row = json.loads(capsys.readouterr().out)["accuracy"][0]
    with open_engine(engine, "onnxruntime") as running:
        ids = np.array([running.tokenizer.encode_text(text.read_text())])
        ours = torch.from_numpy(engine_logits(running, "", ids, prompt=ids.size)[0]).double()
    reference = PeftReference(coded.model, {"a": coded.adapter})
    theirs = torch.from_numpy(reference.logits("", ids, np.ones_like(ids))[0]).double()
    labels = torch.from_numpy(ids[0, 1:])
    for logits, name in ((theirs, "float_perplexity"), (ours, "perplexity")):
        loss = torch.nn.functional.cross_entropy(logits[:-1], labels)
        assert row[name] == pytest.approx(float(loss.exp()), rel=1e-6)
    ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    assert row["divergence"] == pytest.approx(float(divergence), rel=1e-6)
    assert row["same_best"] == float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


def test_a_text_is_for_the_float_model_alone(made: Made, tmp_path: Path) -> None:
    assert exit_code(made, "--text", str(tmp_path)) == 2
    assert exit_code(made, "--reference", "float", "--text", str(tmp_path / "none")) == 2
