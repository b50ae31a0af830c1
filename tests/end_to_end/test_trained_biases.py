"""PEFT's `bias: all | lora_only`, end to end: an engine with vectors answers as PEFT does."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters.peft_fields import CONFIG, PREFIX, WEIGHTS, bound_manager
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.slot_rows import logits_in_a_batch
from support.models.tiny_models import VOCABULARY, save_adapter, tiny_config
from support.models.vector_engine import VectorEngine, vector_engine
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import load_adapter, open_engine
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow

RELATIVE = 1e-5  # of the largest logit
Q_AND_V = ["q_proj", "v_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"bias": "all", "target_modules": Q_AND_V},  # the keys' too, which have no A and B
    "lora_only": {"bias": "lora_only", "target_modules": Q_AND_V},
    "dora": {"bias": "all", "target_modules": Q_AND_V, "use_dora": True},
    "both": {"bias": "lora_only", "target_modules": ["q_proj"], "lora_bias": True},
    "nothing": {"bias": "lora_only", "target_modules": ["o_proj"]},  # which has no bias
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorEngine]:
    with ExitStack() as stack:
        yield vector_engine("Qwen2", tmp_path_factory.mktemp("qwen"), stack, ADAPTERS)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorEngine]:
    with ExitStack() as stack:
        yield vector_engine("GPT2", tmp_path_factory.mktemp("gpt2"), stack, {})


def assert_answers_as_peft(
    built: VectorEngine, adapter: Path, loaded: Path | None = None
) -> Coverage:
    """PEFT's logits over a prompt and some steps; it puts no bias back, so it is loaded anew."""
    manager = bound_manager(built.engine)
    coverage = manager.load_weights("a", loaded or adapter)
    assert coverage is not None
    ours, plain = (engine_logits(built.engine, manager, name) for name in ("a", ""))
    theirs = PeftReference(built.model, {"a": adapter}).logits("a", *batch())
    assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()
    assert largest_error(ours, plain) > 1000 * RELATIVE
    return coverage


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_with_trained_biases_answers_as_peft_does(qwen: VectorEngine, name: str) -> None:
    coverage = assert_answers_as_peft(qwen, qwen.adapters[name])
    assert coverage.is_taken
    sites = {site.path.rpartition(".")[2]: site for site in coverage.adapted}
    assert sites.keys() >= ({*Q_AND_V, "k_proj"} if name in ("all", "dora") else set())
    assert all("bias" in site.vectors for site in sites.values()) == (name != "nothing")


def test_biases_of_conv1d_and_of_norms_that_are_the_base_models_own(gpt2: VectorEngine) -> None:
    adapter = save_adapter(gpt2.model, gpt2.model.parent / "a", bias="all", target_modules=["c_fc"])
    coverage = assert_answers_as_peft(gpt2, adapter)
    ignored = f"{PREFIX}transformer.h.0.ln_1.bias"
    assert "is a copy of the base model's own" in coverage.ignored[ignored]


def test_rows_with_trained_biases_answer_as_each_does_alone(tmp_path: Path) -> None:
    rng, steps = np.random.default_rng(0), 4
    names = ["all", "", "dora", "lora_only", "all"]
    rows = [rng.integers(3, VOCABULARY, 3 + 2 * place + steps) for place in range(len(names))]
    with ExitStack() as stack:
        built = vector_engine(
            "Qwen2", tmp_path, stack, ADAPTERS, max_loras=3, max_batch_size=len(rows)
        )
        for name in {*names} - {""}:
            built.engine.adapters.load(name, built.adapters[name])
        found = logits_in_a_batch(built.engine, names, rows, steps)
    for name, ids, ours in zip(names, rows, found, strict=True):
        reference = PeftReference(built.model, {name: built.adapters[name]} if name else {})
        theirs = reference.logits(name, ids[None], np.ones_like(ids[None]))[0]
        assert np.abs(ours - theirs).max() < RELATIVE * np.abs(theirs).max(), name


@pytest.mark.parametrize("option", ["base", "engine"])
def test_a_converted_adapter_needs_no_weights(
    qwen: VectorEngine, option: str, tmp_path: Path
) -> None:
    base = qwen.model if option == "base" else qwen.engine.directory
    given = ("--format", "edgellm", "--dtype", "float32", f"--{option}", base)
    main([*map(str, ("convert-adapter", qwen.adapters["dora"], tmp_path / "out", *given))])
    assert_answers_as_peft(qwen, qwen.adapters["dora"], tmp_path / "out")


@pytest.mark.parametrize("name", ["all", "both"])
def test_an_adapter_goes_to_pefts_format_and_back(
    qwen: VectorEngine, name: str, tmp_path: Path
) -> None:
    for out, given in (("same", ()), ("engine", ("--engine", str(qwen.engine.directory)))):
        whole = ("--dtype", "float32", "--format", "peft", *given)
        main(["convert-adapter", str(qwen.adapters[name]), str(tmp_path / out), *whole])
        assert_answers_as_peft(qwen, tmp_path / out)
        assert_answers_as_peft(qwen, qwen.adapters[name], tmp_path / out)


# ---------------------------------------------------------------------------------------- refused


Q, K = "self_attn.q_proj", "self_attn.k_proj"


def load(built: VectorEngine, adapter: Path) -> None:
    bound_manager(built.engine).load_weights("a", adapter)


def test_a_conversion_without_a_base_is_refused(
    qwen: VectorEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = str(qwen.adapters["all"])
    with pytest.raises(SystemExit):
        main(["convert-adapter", adapter, str(tmp_path / "out"), "--format", "edgellm"])
    assert "is a whole bias, which needs the base model's weights" in capsys.readouterr().err


def test_an_engine_without_vectors_refuses_biases(qwen: VectorEngine, tmp_path: Path) -> None:
    quick_build(tiny_config(qwen.model, tmp_path / "e"))
    with open_engine(tmp_path / "e") as engine:
        with refused(AdapterError, "bias is 'all'", "trt-lora merge", "--lora-vectors"):
            bound_manager(engine).load_weights("a", qwen.adapters["all"])
        bound_manager(engine).load_weights("a", qwen.adapters["nothing"])  # nothing to refuse


def edited(adapter: Path, folder: Path, names: Mapping[str, str]) -> Path:
    """A copy with other names of some tensors of layer 0."""
    folder.mkdir()
    (folder / CONFIG).write_bytes((adapter / CONFIG).read_bytes())
    tensors, layer = load_file(adapter / WEIGHTS), f"{PREFIX}model.layers.0."
    for old, new in names.items():
        tensors[f"{layer}{new}"] = tensors[f"{layer}{old}"].copy()
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_a_bias_of_no_site_is_refused_by_name(qwen: VectorEngine, tmp_path: Path) -> None:
    options = {"lora_vectors": True, "target_modules": ("attn_q", "attn_v")}
    quick_build(tiny_config(qwen.model, tmp_path / "e", **options))
    with open_engine(tmp_path / "e") as engine:
        name = "model.layers.0.self_attn.k_proj.bias"
        with refused(AdapterError, name, "it was trained", "trt-lora merge"):
            bound_manager(engine).load_weights("a", qwen.adapters["all"])
        bound_manager(engine).load_weights("a", qwen.adapters["lora_only"])


def test_a_build_for_biases_says_which_have_no_site(qwen: VectorEngine, tmp_path: Path) -> None:
    options = {"lora_vectors": True, "lora_dirs": (qwen.adapters["all"],), "target_modules": ()}
    with refused(AdapterError, "k_proj.bias cannot be used", "it was trained"):
        quick_build(tiny_config(qwen.model, tmp_path / "e", **options))
    quick_build(
        tiny_config(
            qwen.model,
            tmp_path / "e",
            **options | {"target_modules": ("attn_q", "attn_k", "attn_v")},
        )
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({f"{Q}.base_layer.bias": "input_layernorm.bias"}, "a bias of no site here"),
        ({f"{Q}.base_layer.bias": "mlp.gate_proj.bias"}, "which has none in model"),
        (
            {"self_attn.k_proj.bias": "self_attn.q_proj.base_layer.bias"},
            "has shape [16], expected [n]",
        ),
        ({f"{K}.bias": f"{K}.base_layer.bias"}, "two of its tensors are"),
    ],
)
def test_a_bias_that_the_model_does_not_have_is_refused(
    qwen: VectorEngine, names: dict[str, str], says: str, tmp_path: Path
) -> None:
    with refused(AdapterError, says):
        bound_manager(qwen.engine).load_weights(
            "a", edited(qwen.adapters["all"], tmp_path / "a", names)
        )


def test_trained_norms_are_refused_by_name(gpt2: VectorEngine, tmp_path: Path) -> None:
    adapter = save_adapter(gpt2.model, tmp_path / "a", bias="all", target_modules=["c_fc"])
    tensors, name = load_file(adapter / WEIGHTS), f"{PREFIX}transformer.h.1.ln_2.bias"
    save_file(tensors | {name: tensors[name] + 1}, adapter / WEIGHTS)
    with refused(AdapterError, name, "it was trained", "trt-lora merge"):
        load(gpt2, adapter)


@pytest.mark.parametrize("value", ["some", True, 1])
def test_what_bias_may_be(qwen: VectorEngine, value: object, tmp_path: Path) -> None:
    adapter = edited(qwen.adapters["all"], tmp_path / "a", {})
    config = json.loads((adapter / CONFIG).read_text()) | {"bias": value}
    (adapter / CONFIG).write_text(json.dumps(config))
    with refused(AdapterError, f"bias is {value!r}, expected none, all or lora_only"):
        load_adapter(adapter)
