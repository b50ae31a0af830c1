"""LoRA of the embedding, and rows of tokens that were trained: an engine answers as PEFT does."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters.peft_fields import CONFIG, PREFIX, WEIGHTS, bound_manager
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.slot_rows import logits_in_a_batch
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config
from support.refusals import refused

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Engine, TensorMap, load_adapter, open_engine
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.manifest import ONNX_FILE
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow

RELATIVE = 1e-5  # of the largest logit
TARGETS = ("all-linear", "lm_head", "embed_tokens")
TOKENS = [4, 90, 7, 12]
ADAPTERS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
    "dict": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": TOKENS}},
    "plain": {"target_modules": ["q_proj"]},
}
ROWS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
UNTIED = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 96]}}


@dataclass(frozen=True)
class Built:
    model: Path
    adapters: dict[str, Path]
    engine: Engine


def build(folder: Path, stack: ExitStack, *, tied: bool, **options: Any) -> Built:
    model = save_model("Llama", folder / "model", tie_word_embeddings=tied)
    quick_build(tiny_config(model, folder / "engine", target_modules=TARGETS, **options))
    engine = stack.enter_context(open_engine(folder / "engine"))
    wanted = ADAPTERS if tied else ADAPTERS | {"head": UNTIED}
    adapters = {
        name: save_adapter(model, folder / name, seed=seed, r=3 + seed, lora_alpha=8, **options)
        for seed, (name, options) in enumerate(wanted.items())
    }
    return Built(model, adapters, engine)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with ExitStack() as stack:
        yield build(tmp_path_factory.mktemp("tied"), stack, tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with ExitStack() as stack:
        yield build(tmp_path_factory.mktemp("untied"), stack, tied=False)


def assert_answers_as_peft(built: Built, adapter: Path, loaded: Path | None = None) -> Coverage:
    """PEFT's logits over a prompt and some steps, and the base model's before and after."""
    manager = bound_manager(built.engine)
    coverage = manager.load_weights("a", loaded or adapter)
    assert coverage is not None
    plain, ours, after = (engine_logits(built.engine, manager, name) for name in ("", "a", ""))
    reference = PeftReference(built.model, {"a": adapter})
    for found, name in ((plain, ""), (ours, "a")):
        theirs = reference.logits(name, *batch())
        assert largest_error(found, theirs) < RELATIVE * np.abs(theirs).max()
    np.testing.assert_array_equal(plain, after)
    assert largest_error(ours, plain) > 1000 * RELATIVE
    return coverage


def test_what_is_compared_has_tokens_that_were_trained() -> None:
    assert len({*TOKENS} & {*batch()[0].ravel().tolist()}) > 1


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_a_tied_embedding_answers_as_peft_does(tied: Built, name: str) -> None:
    coverage = assert_answers_as_peft(tied, tied.adapters[name])
    ranks = {site.path: site.rank for site in coverage.adapted if "layers" not in site.path}
    expected = {"model.embed_tokens": 4, "lm_head": 4} if name in ("tokens", "dict") else {}
    assert ranks == expected | ({"model.embed_tokens": 3} if name == "embedding" else {})


@pytest.mark.parametrize("name", [*ADAPTERS, "head"])
def test_an_adapter_of_an_embedding_answers_as_peft_does(untied: Built, name: str) -> None:
    coverage = assert_answers_as_peft(untied, untied.adapters[name])
    assert ("lm_head" in {site.path for site in coverage.adapted}) == (name == "head")


def test_gpt2s_embedding_and_tokens(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "a": {"target_modules": ["c_attn", "wte"]},
        "b": {"target_modules": ["c_attn"], "trainable_token_indices": [0, 96]},
    }
    model = save_model("GPT2", tmp_path / "model")
    quick_build(tiny_config(model, tmp_path / "engine", target_modules=TARGETS))
    with open_engine(tmp_path / "engine") as engine:
        for name, options in cases.items():
            adapter = save_adapter(model, tmp_path / name, **options)
            assert_answers_as_peft(Built(model, {}, engine), adapter)


def test_rows_with_other_adapters_answer_as_each_does_alone(tmp_path: Path) -> None:
    rng, steps = np.random.default_rng(0), 5
    names = ["embedding", "", "tokens", "plain", "embedding", "dict"]
    rows = [rng.integers(3, VOCABULARY, 3 + 2 * place + steps) for place in range(len(names))]
    rows[2][-2:] = TOKENS[:2]
    with ExitStack() as stack:
        built = build(tmp_path, stack, tied=True, max_loras=4, max_batch_size=len(rows))
        for name in {*names} - {""}:
            built.engine.adapters.load(name, built.adapters[name])
        found = logits_in_a_batch(built.engine, names, rows, steps)
        plain = engine_without_lora(built.engine.directory, tmp_path)
    for name, ids, ours in zip(names, rows, found, strict=True):
        reference = PeftReference(built.model, {name: built.adapters[name]} if name else {})
        theirs = reference.logits(name, ids[None], np.ones_like(ids[None]))[0]
        assert np.abs(ours - theirs).max() < RELATIVE * np.abs(theirs).max(), name
    assert not [v for v in ir.load(plain / ONNX_FILE).graph.inputs if "lora" in str(v.name)]


def test_the_graph_without_lora_is_the_base_models(tied: Built, tmp_path: Path) -> None:
    ids = batch()[0][1:]
    ours = engine_logits(tied.engine, bound_manager(tied.engine), "")[1]
    with open_engine(engine_without_lora(tied.engine.directory, tmp_path)) as engine:
        (theirs,) = forced_logits(engine, TensorMap(), ids.tolist(), 8)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["embedding", "tokens"])
@pytest.mark.parametrize("format", ["peft", "edgellm"])
def test_a_converted_adapter_answers_alike(
    tied: Built, name: str, format: str, tmp_path: Path
) -> None:
    given = ("--format", format, "--dtype", "float32", "--engine", tied.engine.directory)
    main([*map(str, ("convert-adapter", tied.adapters[name], tmp_path / "out", *given))])
    assert_answers_as_peft(tied, tied.adapters[name], tmp_path / "out")


def test_tokens_go_to_pefts_format_and_back_as_they_are(tied: Built, tmp_path: Path) -> None:
    given = ("convert-adapter", tied.adapters["tokens"], tmp_path / "out", "--format", "peft")
    main([*map(str, given)])
    assert_answers_as_peft(tied, tmp_path / "out")
    ours, theirs = (
        load_file(path / WEIGHTS) for path in (tmp_path / "out", tied.adapters["tokens"])
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor)


def test_a_strength_of_tokens_is_that_much_of_the_difference(tied: Built, tmp_path: Path) -> None:
    adapter = tied.adapters["tokens"]
    alpha = json.loads((adapter / CONFIG).read_text())["lora_alpha"]
    half = edited(adapter, tmp_path / "half", lora_alpha=alpha / 2)
    base = load_file(tied.model / "model.safetensors")["model.embed_tokens.weight"][TOKENS]
    tensors = load_file(adapter / WEIGHTS)
    tensors[ROWS] = (tensors[ROWS] + base) / 2
    save_file(tensors, half / WEIGHTS)
    manager = bound_manager(tied.engine)
    manager.load_weights("whole", adapter)
    manager.load_weights("half", half)
    theirs = engine_logits(tied.engine, manager, "half")
    ours = engine_logits(tied.engine, manager, "whole@0.5")
    assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()


# ---------------------------------------------------------------------------------------- refused


def assert_refused(directory: Path, adapter: Path, *says: str) -> None:
    with open_engine(directory) as engine, refused(AdapterError, *says):
        bound_manager(engine).load_weights("a", adapter)


def test_an_engine_without_the_embedding_refuses_both(tied: Built, tmp_path: Path) -> None:
    quick_build(tiny_config(tied.model, tmp_path / "e"))
    for name, says in (
        ("embedding", "an embedding takes LoRA in an engine built with --lora-target-modules"),
        ("tokens", "trainable_token_indices is [4, 90, 7, 12]"),
    ):
        assert_refused(tmp_path / "e", tied.adapters[name], says, "embed_tokens", "--lora")


def test_tokens_of_a_tied_head_need_its_site(tied: Built, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ("attn_q", "embed_tokens")}
    quick_build(tiny_config(tied.model, tmp_path / "e", **options))
    assert_refused(
        tmp_path / "e", tied.adapters["tokens"], "trainable_token_indices", "embed_tokens lm_head"
    )
    with refused(AdapterError, "add lm_head to --lora-target-modules"):
        quick_build(
            tiny_config(tied.model, tmp_path / "f", lora_dirs=(tied.adapters["tokens"],), **options)
        )


def test_more_tokens_than_the_engines_rank_are_refused_with_theirs(
    tied: Built, tmp_path: Path
) -> None:
    options = {"target_modules": TARGETS, "max_lora_rank": 3}
    quick_build(tiny_config(tied.model, tmp_path / "e", **options))
    assert_refused(tmp_path / "e", tied.adapters["tokens"], "has rank 4", "--max-lora-rank 4")


def test_codes_have_no_rows_to_replace(tied: Built, tmp_path: Path) -> None:
    quick_build(tiny_config(tied.model, tmp_path / "e", target_modules=TARGETS, quantize="int8"))
    with open_engine(tmp_path / "e") as engine:
        with refused(AdapterError, "of which the engine has no floats"):
            bound_manager(engine).load_weights("a", tied.adapters["tokens"])
        bound_manager(engine).load_weights("a", tied.adapters["embedding"])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([4, 90, 7, 4], "expected token ids, each once"),
        ([4, 90, 7, -1], "expected token ids, each once"),
        ([4, 90, 7, True], "expected token ids, each once"),
        ({"embed_tokens": 4}, "expected token ids, each once"),
        ([4, 90, 7, VOCABULARY], f"has {VOCABULARY}, and model has {VOCABULARY} tokens"),
        ([4, 90, 7], "names 3 tokens of model.embed_tokens"),
        ({"lm_head": [4, 90, 7, 12]}, "names 0 tokens of model.embed_tokens"),
        (None, "names 0 tokens"),
    ],
)
def test_tokens_that_are_none_are_refused(
    tied: Built, tokens: object, says: str, tmp_path: Path
) -> None:
    adapter = edited(tied.adapters["tokens"], tmp_path / "a", trainable_token_indices=tokens)
    with refused(AdapterError, says):
        bound_manager(tied.engine).load_weights("a", adapter)


def test_tokens_without_rows_are_refused(tied: Built, tmp_path: Path) -> None:
    adapter = edited(tied.adapters["plain"], tmp_path / "a", trainable_token_indices=[1])
    with refused(AdapterError, "has no rows of tokens"):
        load_adapter(adapter)


def test_rows_of_another_width_are_refused(tied: Built, tmp_path: Path) -> None:
    adapter = edited(tied.adapters["tokens"], tmp_path / "a")
    save_file(
        load_file(adapter / WEIGHTS) | {ROWS: np.ones((4, 31), np.float32)}, adapter / WEIGHTS
    )
    with refused(AdapterError, ROWS, "n=32"):
        bound_manager(tied.engine).load_weights("a", adapter)


def test_dora_of_an_embedding_is_refused_by_name(tied: Built, tmp_path: Path) -> None:
    options = {"lora_vectors": True, "target_modules": TARGETS}
    quick_build(tiny_config(tied.model, tmp_path / "e", **options))
    adapter = save_adapter(
        tied.model, tmp_path / "a", target_modules=["embed_tokens"], use_dora=True
    )
    assert_refused(tmp_path / "e", adapter, "model.embed_tokens", "DoRA")


def test_positions_are_no_embedding_of_tokens(tmp_path: Path) -> None:
    model = save_model("GPT2", tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "a", target_modules=["c_attn", "wpe"])
    quick_build(tiny_config(model, tmp_path / "e", target_modules=TARGETS))
    assert_refused(tmp_path / "e", adapter, "transformer.wpe", "trt-lora merge")


def edited(adapter: Path, folder: Path, **fields: object) -> Path:
    """A copy with other fields of its config."""
    folder.mkdir()
    config = json.loads((adapter / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    return folder
