"""PEFT's `modules_to_save` of heads and embeddings: an engine that takes them answers as PEFT."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters.peft_fields import CONFIG, PREFIX, WEIGHTS, bound_manager
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config
from support.models.vector_engine import VectorEngine, vector_engine
from support.refusals import refused

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime import Engine, TensorMap, load_adapter, open_engine
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.manifest import ONNX_FILE, Manifest, read_manifest
from trt_lora.runtime.server.adapters.vllm_phrases import vllm_phrases
from trt_lora.scripts.terminal.build_options import build_config, build_parser
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.deltas import delta_errors, engine_factors
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow

RELATIVE = 1e-5  # of the largest logit
WIDTH, RANK = 32, 8
HEAD, TABLE = "lm_head", "model.embed_tokens"
BOTH = ("lm_head", "embed_tokens")
Q: dict[str, Any] = {"target_modules": ["q_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "head": Q | {"modules_to_save": ["lm_head"]},
    "table": Q | {"modules_to_save": ["embed_tokens"]},
    "both": Q | {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tying": Q | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}
# Not of a tied head: PEFT writes no weight of it then.
TOKENS = Q | {"modules_to_save": ["lm_head"], "trainable_token_indices": [4, 90, 7]}
WHOLE = {"head": {HEAD}, "table": {TABLE}, "both": {HEAD, TABLE}, "tying": {TABLE}}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VectorEngine]:
    folder, is_tied = tmp_path_factory.mktemp("built"), bool(request.param)
    model = save_model("Llama", folder / "model", tie_word_embeddings=is_tied)
    config = {"lora_saved_modules": BOTH, "target_modules": ("all-linear",), "max_lora_rank": RANK}
    quick_build(tiny_config(model, folder / "engine", **config))
    adapters = {
        name: save_adapter(model, folder / name, seed=seed, r=2 + seed, lora_alpha=8, **options)
        for seed, (name, options) in enumerate((ADAPTERS | {"tokens": TOKENS}).items())
    }
    with open_engine(folder / "engine") as engine:
        yield VectorEngine(model, adapters, engine)


def is_tied(engine: Engine) -> bool:
    return bool(engine.manifest.base_model.tied_head)


def assert_answers_as_peft(
    model: Path, engine: Engine, adapter: Path, loaded: Path | None = None
) -> Coverage:
    """PEFT's logits over a prompt and some steps, and the same again behind the base model's."""
    manager = bound_manager(engine)
    coverage = manager.load_weights("a", loaded or adapter)
    assert coverage is not None
    names = ("a", "", "a", "")
    ours, plain, again, after = (engine_logits(engine, manager, name) for name in names)
    reference = PeftReference(model, {"a": adapter})
    for found, name in ((plain, ""), (ours, "a")):
        theirs = reference.logits(name, *batch())
        assert largest_error(found, theirs) < RELATIVE * np.abs(theirs).max()
    np.testing.assert_array_equal(ours, again)
    np.testing.assert_array_equal(plain, after)
    assert largest_error(ours, plain) > 1000 * RELATIVE
    return coverage


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_with_whole_modules_answers_as_peft_does(built: VectorEngine, name: str) -> None:
    coverage = assert_answers_as_peft(built.model, built.engine, built.adapters[name])
    found = {site.path: site for site in coverage.adapted if "layers" not in site.path}
    if name in WHOLE:
        paths = {HEAD, TABLE} if name == "tying" and is_tied(built.engine) else WHOLE[name]
        both = 4 * (VOCABULARY * WIDTH + WIDTH * WIDTH)  # the difference, and the identity
        expected = dict.fromkeys(paths, (WIDTH, both))
        assert {path: (site.rank, site.nbytes) for path, site in found.items()} == expected
    else:
        assert {site.rank for site in found.values()} == {6}


def test_trained_tokens_beside_a_whole_head(built: VectorEngine) -> None:
    adapter = built.adapters["tokens"]
    if is_tied(built.engine):
        with refused(AdapterError, "modules_to_save is ['lm_head'], and its file has no weight"):
            load_adapter(adapter)
        return
    coverage = assert_answers_as_peft(built.model, built.engine, adapter)
    found = {site.path: site.rank for site in coverage.adapted if "layers" not in site.path}
    assert found == {HEAD: WIDTH, TABLE: 3}


@pytest.mark.parametrize("name", ["both", "tying"])
def test_verify_finds_pefts_deltas_and_sees_another(built: VectorEngine, name: str) -> None:
    built.engine.adapters.load("verified", built.adapters[name])
    ours = engine_factors(built.engine.adapters, "verified")
    right, wrong = (
        delta_errors(ours, PeftReference(built.model, {"a": built.adapters[n]}).factors("a"))
        for n in (name, "head")
    )
    assert right.keys() == ours.keys() > {TABLE}
    assert max(right.values()) < RELATIVE < wrong[TABLE]
    built.engine.adapters.unload("verified")


def test_inspect_names_them(built: VectorEngine) -> None:
    facts = engine_facts(built.engine.directory, built.engine.manifest)
    assert facts["ranks"].endswith("; lm_head and model.embed_tokens saved whole")
    most = {
        site.path: built.engine.manifest.most_rank(site) for site in built.engine.manifest.sites
    }
    assert most == dict.fromkeys(most, RANK) | {HEAD: WIDTH, TABLE: WIDTH}


def test_their_bytes_are_the_stores(built: VectorEngine) -> None:
    store = built.engine.adapters
    before = store.stats.memory_bytes
    coverage = store.load("bytes", built.adapters["both"])
    grown = store.stats.memory_bytes - before
    assert coverage.nbytes <= grown < coverage.nbytes + 256 * len(coverage.bindings)
    store.unload("bytes")


@pytest.mark.parametrize("format", ["peft", "edgellm"])
def test_a_converted_adapter_answers_alike(
    built: VectorEngine, format: str, tmp_path: Path
) -> None:
    given = ("--format", format, "--dtype", "float32", "--engine", built.engine.directory)
    adapter = built.adapters["both"]
    main([*map(str, ("convert-adapter", adapter, tmp_path / "out", *given))])
    assert_answers_as_peft(built.model, built.engine, adapter, tmp_path / "out")


def test_they_go_to_pefts_format_and_back_as_they_are(built: VectorEngine, tmp_path: Path) -> None:
    adapter = built.adapters["tying"]
    main([*map(str, ("convert-adapter", adapter, tmp_path / "out", "--format", "peft"))])
    assert_answers_as_peft(built.model, built.engine, tmp_path / "out")
    ours, theirs = (load_file(path / WEIGHTS) for path in (tmp_path / "out", adapter))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def test_a_strength_is_that_much_of_the_difference(built: VectorEngine, tmp_path: Path) -> None:
    adapter = built.adapters["both"]
    half, tensors = edited(adapter, tmp_path / "half", lora_alpha=4), load_file(adapter / WEIGHTS)
    own = load_file(built.model / "model.safetensors")
    for path in (HEAD, TABLE):
        base = own.get(f"{path}.weight", own[f"{TABLE}.weight"])
        tensors[f"{PREFIX}{path}.weight"] = (tensors[f"{PREFIX}{path}.weight"] + base) / 2
    save_file(tensors, half / WEIGHTS)
    manager = bound_manager(built.engine)
    manager.load_weights("whole", adapter)
    manager.load_weights("half", half)
    ours, theirs = (engine_logits(built.engine, manager, n) for n in ("whole@0.5", "half"))
    assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()
    with refused(AdapterError, "one part alone may have saved it whole"):
        manager.blend("sum", {"whole": 0.25, "half": 0.5})
    nothing = save_adapter(built.model, tmp_path / "q", r=2, lora_alpha=0, **Q)
    manager.load_weights("nothing", nothing)
    manager.blend("blend", {"whole": 0.5, "nothing": 2.0})
    ours = engine_logits(built.engine, manager, "blend")
    assert largest_error(ours, theirs) < RELATIVE * np.abs(theirs).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_is_cast_as_that_of_all_weights(
    built: VectorEngine, dtype: torch.dtype, tmp_path: Path
) -> None:
    adapter = edited(built.adapters["both"], tmp_path / "a")
    tensors = load_file(adapter / WEIGHTS)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, adapter / WEIGHTS)
    coverage = assert_answers_as_peft(built.model, built.engine, adapter)
    assert {site.dtype for site in coverage.adapted} == {"float32"}


def test_the_graph_without_lora_is_the_base_models(built: VectorEngine, tmp_path: Path) -> None:
    ids = batch()[0][1:]
    ours = engine_logits(built.engine, bound_manager(built.engine), "")[1]
    with open_engine(engine_without_lora(built.engine.directory, tmp_path)) as engine:
        (theirs,) = forced_logits(engine, TensorMap(), ids.tolist(), 8)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_gpt2s_beside_dora(tmp_path: Path) -> None:
    fields = {"target_modules": ["c_attn"], "use_dora": True, "modules_to_save": ["wte", "lm_head"]}
    with ExitStack() as stack:
        gpt2 = vector_engine("GPT2", tmp_path, stack, {"a": fields}, lora_saved_modules=BOTH)
        assert gpt2.engine.manifest.saved_modules == (HEAD, "transformer.wte")
        assert_answers_as_peft(gpt2.model, gpt2.engine, gpt2.adapters["a"])


def test_codes_beside_a_head_in_floats(built: VectorEngine, tmp_path: Path) -> None:
    options = {"quantize": "int8", "quantize_head": "none", "lora_saved_modules": BOTH}
    quick_build(tiny_config(built.model, tmp_path / "e", quantize_level="exact", **options))
    with open_engine(tmp_path / "e") as engine:
        manager = bound_manager(engine)
        manager.load_weights("a", built.adapters["head"])
        ours, plain = (engine_logits(engine, manager, name) for name in ("a", ""))
    theirs, base = (
        PeftReference(built.model, {"a": built.adapters["head"]}).logits(name, *batch())
        for name in ("a", "")
    )
    error = np.abs(base).max() * 0.05
    assert largest_error(plain, base) < error
    assert largest_error(ours, theirs) < 2 * error < largest_error(ours, plain)


def test_tensorrt_builds_it_with_ranks_that_no_kernel_takes(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    model = save_model("Llama", tmp_path / "model", hidden_size=640, num_hidden_layers=1)
    options = {"flavour": "tensorrt-rtx", "dtype": "float16", "lora_saved_modules": BOTH}
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **options))
    assert manifest.lora_plugin == "plugin"
    readers = [n for n in ir.load(tmp_path / "engine" / ONNX_FILE).graph if n.domain == DOMAIN]
    assert readers
    assert "lora_A_lm_head" not in {
        value.name for node in readers for value in node.inputs if value
    }
    assert manifest.files["engine.plan"].size_bytes > 0
    for ranges in manifest.profiles.values():
        assert ranges["lora_B_lm_head"].max == (640, VOCABULARY)
        assert ranges["lora_A_model.embed_tokens"].max == (VOCABULARY, 640)
        assert ranges["lora_A_model.layers.0.self_attn.q_proj"].max == (640, manifest.max_lora_rank)


# ---------------------------------------------------------------------------------------- refused


def edited(adapter: Path, folder: Path, **fields: object) -> Path:
    """A copy with other fields of its config."""
    folder.mkdir()
    config = json.loads((adapter / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes())
    return folder


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(VOCABULARY + 1, WIDTH), f"[{VOCABULARY + 1}, {WIDTH}]"),
        (torch.ones(VOCABULARY - 1, WIDTH), f"[{VOCABULARY - 1}, {WIDTH}]"),
        (torch.ones(VOCABULARY, WIDTH + 1), f"[{VOCABULARY}, {WIDTH + 1}]"),
        (torch.ones(VOCABULARY), "expected a matrix"),
        (torch.full((VOCABULARY, WIDTH), torch.nan), "NaN"),
        (torch.ones(VOCABULARY, WIDTH, dtype=torch.float64), "F64"),
        (torch.ones(VOCABULARY, WIDTH, dtype=torch.int8), "I8"),
    ],
)
def test_a_head_that_is_none_of_the_engines_is_refused(
    built: VectorEngine, tensor: torch.Tensor, says: str, tmp_path: Path
) -> None:
    adapter = edited(built.adapters["head"], tmp_path / "a")
    tensors = load_file(adapter / WEIGHTS)
    save_file(tensors | {f"{PREFIX}lm_head.weight": tensor}, adapter / WEIGHTS)
    sizes = [f"[{VOCABULARY}, {WIDTH}]", "trt-lora merge"] if "[" in says else []
    with refused(AdapterError, f"{PREFIX}lm_head.weight", says, *sizes):
        bound_manager(built.engine).load_weights("a", adapter)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (["norm"], "modules_to_save is ['norm']"),
        (["lm_head", "score"], "modules_to_save is ['lm_head', 'score']"),
        (["classifier"], "modules_to_save is ['classifier']"),
        ("lm_head", "modules_to_save is 'lm_head'"),
        (["lm_head", "embed_tokens"], "modules_to_save is ['embed_tokens'], and its file has no"),
        (None, f"{PREFIX}lm_head.weight"),
    ],
)
def test_other_modules_and_absent_ones_are_refused(
    built: VectorEngine, modules: object, says: str, tmp_path: Path
) -> None:
    adapter = edited(built.adapters["head"], tmp_path / "a", modules_to_save=modules)
    with refused(AdapterError, says):
        bound_manager(built.engine).load_weights("a", adapter)


def test_a_module_has_no_lora_beside(built: VectorEngine, tmp_path: Path) -> None:
    adapter = edited(built.adapters["lora"], tmp_path / "a", modules_to_save=["lm_head"])
    head = {f"{PREFIX}lm_head.weight": torch.ones(VOCABULARY, WIDTH)}
    save_file(load_file(adapter / WEIGHTS) | head, adapter / WEIGHTS)
    with refused(AdapterError, "lm_head has LoRA too"):
        bound_manager(built.engine).load_weights("a", adapter)


@pytest.mark.parametrize("slots", [0, 2])
def test_an_engine_without_such_inputs_says_how_to_build_one(
    built: VectorEngine, slots: int, tmp_path: Path
) -> None:
    options = {"target_modules": ("all-linear", *BOTH), "max_loras": slots}
    manifest = quick_build(tiny_config(built.model, tmp_path / "e", **options))
    assert manifest.saved_modules == ()
    advice = ("trt-lora merge", "--lora-saved-modules embed_tokens lm_head")
    with open_engine(tmp_path / "e") as engine:
        for name in ("head", "both"):
            says = (f"modules_to_save is {ADAPTERS[name]['modules_to_save']}", advice[0])
            with refused(AdapterError, *says, advice[1] if name == "both" else "lm_head"):
                engine.adapters.load(name, built.adapters[name])
    with refused(ConfigError, "modules_to_save is ['lm_head']", "--lora-saved-modules lm_head"):
        quick_build(tiny_config(built.model, tmp_path / "f", lora_dirs=(built.adapters["head"],)))


def test_vllms_phrase_is_of_engines_without(built: VectorEngine) -> None:
    def phrases(manifest: Manifest, name: str) -> list[str]:
        return vllm_phrases(built.adapters[name], manifest)

    taken = read_manifest(built.engine.directory)
    assert phrases(taken, "both") == phrases(taken, "table") == []
    for paths in ((), (HEAD,)):
        (said,) = phrases(replace(taken, saved_modules=paths), "both")
        assert said.startswith("Unsupported modules_to_save: ['embed_tokens', 'lm_head']")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("lm_head,norm", "--lora-saved-modules is 'norm'"),
        ("lm_head embed_tokens --max-loras 4", "--max-loras 4, each slot would be as large"),
        ("lm_head,embed_tokens --quantize int4", "pass --quantize-head none"),
        ("lm_head --onnx model.onnx", "--lora-saved-modules ['lm_head'] is of language models"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: str, says: str, tmp_path: Path
) -> None:
    given = ["--lora-saved-modules", *options.split(), "--lora-target-modules", "attn_q"]
    if "--onnx" not in options:
        given += ["--model", str(tmp_path)]
    with refused(ConfigError, says):
        build_config(build_parser().parse_args(given))


def test_commas_and_spaces_are_alike(tmp_path: Path) -> None:
    for names in (["lm_head,embed_tokens"], ["lm_head", "embed_tokens"]):
        given = ["--model", str(tmp_path), "--lora-target-modules", "attn_q"]
        config = build_config(build_parser().parse_args([*given, "--lora-saved-modules", *names]))
        assert getattr(config, "lora_saved_modules") == BOTH  # noqa: B009 - graphs have none
