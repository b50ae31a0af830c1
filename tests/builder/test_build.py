"""Building an engine directory: what is in it, and that a failed build leaves nothing."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyEngine
from support.build_progress import Notes, StopAt
from support.models.checkpoints import open_checkpoint
from support.models.quick_build import quick_build, shared_traces
from support.models.tiny_models import POSITIONS, save_model, tiny_config
from transformers import AriaTextConfig, LlamaConfig, MambaConfig

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.builder.checks.check_model import check_model
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.builder.resolved_lora import resolve_lora
from trt_lora.builder.write_engine import _copy_text_files, make_graph
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime import read_manifest
from trt_lora.runtime.files.file_record import file_record


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_manifest_describes_the_files_beside_it(tiny_engine: TinyEngine) -> None:
    manifest = read_manifest(tiny_engine.engine)
    assert set(manifest.files) | {"manifest.json"} == {p.name for p in tiny_engine.engine.iterdir()}
    for name, record in manifest.files.items():
        assert file_record(tiny_engine.engine / name) == record
    assert manifest.flavour == "none"
    assert manifest.versions["torch"].startswith("2.13")


def test_what_the_model_recommends_for_sampling_is_in_the_engine(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    name = "generation_config.json"
    for kept in (name, "config.json"):
        assert (tiny_engine.engine / kept).read_bytes() == (tiny_engine.model / kept).read_bytes()
    model, engine, progress = tmp_path / "model", tmp_path / "engine", Notes()
    model.mkdir()
    engine.mkdir()
    (model / name).write_text('{"num_beams": 4}')
    _copy_text_files(model, engine, progress)
    assert "num_beams is 4, which is not done here; expected 1" in progress.notes[0]


def test_the_manifest_names_sites_bindings_and_profiles(tiny_engine: TinyEngine) -> None:
    manifest = read_manifest(tiny_engine.engine)
    assert [site.path for site in manifest.sites] == [
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"
    ]
    assert {(site.k, site.n) for site in manifest.sites} == {(32, 32), (32, 16)}
    inputs = {binding.name: binding for binding in manifest.inputs}
    assert inputs["input_ids"].shape == ("batch", "sequence")
    assert inputs["cache.1.key"].shape == ("batch", 2, POSITIONS, 8)
    assert {o.name: o.in_place_of for o in manifest.outputs}["new_cache.1.key"] == "cache.1.key"
    assert manifest.profiles["decode"]["bound"].min == (POSITIONS,)
    a = "lora_A_model.layers.0.self_attn.q_proj"
    assert inputs[a].shape == (32, "rank_model.layers.0.self_attn.q_proj")
    for name in ("decode", "prefill"):
        allowed = manifest.profiles[name][a]
        assert (allowed.min, allowed.opt, allowed.max) == ((32, 1), (32, 16), (32, 16))
    assert manifest.profiles["decode"]["input_ids"].max == (2, 1)
    assert manifest.profiles["prefill"]["input_ids"].max == (2, POSITIONS // 2)


def test_the_manifest_knows_the_base_model(tiny_engine: TinyEngine) -> None:
    base = read_manifest(tiny_engine.engine).base_model
    assert (base.name, base.architecture) == ("model", "LlamaForCausalLM")
    assert (base.stop_token_ids, base.pad_token_id) == ((2,), 0)
    assert len(base.fingerprint) == 64


def test_the_fingerprint_changes_with_the_config(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    from trt_lora.builder.checkpoint.base_model import describe

    other = tmp_path / "other"
    shutil.copytree(tiny_engine.model, other)
    same = describe(*open_checkpoint(other)).fingerprint
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    changed = describe(*open_checkpoint(other)).fingerprint
    assert same == read_manifest(tiny_engine.engine).base_model.fingerprint
    assert changed != same


def test_metadata_of_the_building_machine_is_not_in_the_file(tiny_engine: TinyEngine) -> None:
    graph = (tiny_engine.engine / "model.onnx").read_bytes()
    assert b"name_scopes" not in graph
    assert b"site-packages" not in graph


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("load", KeyboardInterrupt()),
        ("insert", KeyboardInterrupt()),
        ("save", OSError(errno.ENOSPC, "no space left")),
        ("describe", OSError(errno.ENOSPC, "no space left")),
    ],
)
def test_a_build_that_stops_anywhere_leaves_nothing(
    stage: str, error: BaseException, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        quick_build(tiny_config(tiny_engine.model, tmp_path / "engine"), StopAt(stage, error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "weights in float32), 0.0 MB are free there; make room, choose another --output or",
        ),
        (
            {"flavour": "tensorrt-rtx", "dtype": "float16"},
            "weights in float16 and a plan of them), ",
        ),
        (
            {"flavour": "tensorrt-rtx", "quantize": "int8"},
            "weights in int8 and a plan of them), 0.0 MB are free there; make room, ",
        ),
    ],
    ids=["no plan", "plan", "codes"],
)
def test_too_little_room_is_noticed_before_a_weight_is_read(
    options: dict[str, Any],
    words: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage, asked = shutil.disk_usage(tmp_path), list[Path]()

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return usage._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    config = tiny_config(tiny_engine.model, tmp_path / "not" / "there" / "engine", **options)
    with pytest.raises(ConfigError) as raised:
        build_engine(config, StopAt("load", AssertionError()))
    assert f"{config.output} takes at least 0.1 MB ({words}" in str(raised.value)
    assert asked == [tmp_path]  # what there is already of the output's path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_an_engine_takes_the_room_that_was_asked_for(
    quantize: str, tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(
        "trt_lora.builder.build._check_room", lambda _, weights, **__: needed.append(weights)
    )
    options = {"quantize": quantize, "quantize_block": 16}
    manifest = quick_build(tiny_config(tiny_engine.model, tmp_path / "e", **options))
    (weights,) = needed
    size = manifest.files["model.onnx.data"].size_bytes
    scales = sum(n * (k // 16) * 4 for n, k in (kind.shape for kind in manifest.weights.values()))
    assert 0.9 * (size - scales) < weights <= size


def test_an_existing_output_is_refused_and_untouched(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.txt").write_text("keep")
    config = tiny_config(tiny_engine.model, tmp_path / "engine")
    with pytest.raises(ConfigError, match=r"exists; choose another --output, or .* --force"):
        build_engine(config)
    with pytest.raises(ConfigError, match=r"is not an engine directory; --force replaces nothing"):
        build_engine(replace(config, force=True))
    assert content(tmp_path) == {"engine/mine.txt": b"keep"}


@pytest.mark.slow
def test_force_replaces_an_engine_and_a_failure_keeps_the_old_one(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    shutil.copytree(tiny_engine.engine, tmp_path / "engine")
    old = content(tmp_path)
    config = tiny_config(tiny_engine.model, tmp_path / "engine", force=True, max_lora_rank=3)
    with pytest.raises(KeyboardInterrupt):
        quick_build(config, StopAt("describe", KeyboardInterrupt()))
    assert content(tmp_path) == old
    quick_build(config)
    assert read_manifest(tmp_path / "engine").max_lora_rank == 3
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


class Appears(StopAt):
    """Progress in the last stage of which a directory appears."""

    def __init__(self, directory: Path, file: str) -> None:
        super().__init__("never", AssertionError())
        self._directory, self._file = directory, file

    def stage(self, name: str) -> None:
        if name == "describe":
            self._directory.mkdir()
            (self._directory / self._file).write_text("mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("force", "file"), [(False, "manifest.json"), (True, "notes.txt")], ids=["no force", "force"]
)
def test_an_output_that_appears_during_the_build_stays_and_the_engine_is_kept(
    force: bool, file: str, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    config = tiny_config(tiny_engine.model, tmp_path / "engine", force=force)
    with pytest.raises(ConfigError, match=r"engine appeared .* stays .*engine-2: move it"):
        quick_build(config, Appears(config.output, file))
    assert content(config.output) == {file: b"mine"}
    assert len(read_manifest(tmp_path / "engine-2").sites) == 14
    assert len(list(tmp_path.iterdir())) == 2


def test_the_dry_run_lists_sites_and_reasons(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    config = tiny_config(tiny_engine.model, tmp_path / "x", target_modules=("q_proj",))
    result = list_sites(config)
    assert [site.path.rsplit(".", 1)[-1] for site in result.sites] == ["q_proj", "q_proj"]
    reasons = {item.path: item.reason for item in result.left_alone}
    assert reasons["model.layers.0.mlp.gate_proj"] == "mlp_h_to_4h is not a target"
    assert reasons["lm_head"] == "lm_head is not a target"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "target"), [("Llama", "q_proj"), ("GPT2", "c_proj")])
def test_the_dry_run_and_the_graph_agree_on_what_is_left_alone(
    architecture: str, target: str, tmp_path: Path
) -> None:
    model = save_model(architecture, tmp_path / "model")
    config = tiny_config(model, tmp_path / "engine", target_modules=(target,))
    listed, lora = list_sites(config), resolve_lora(config)
    build = ResolvedBuild(config, lora, None, "native", check_model(config, lora))
    with shared_traces():
        graph = make_graph(build, NoProgress())
    assert set(listed.sites) == set(graph.inserted.sites)
    of_graph = {item.path: item.reason for item in graph.inserted.left_alone}
    of_modules = {item.path: item.reason for item in listed.left_alone}
    assert of_modules.items() <= of_graph.items()
    others = {reason for path, reason in of_graph.items() if path not in of_modules}
    assert others == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lora_rank": 0}, "--max-lora-rank is 0, expected a whole number from 1 to 512"),
        ({"max_lora_rank": 513}, "--max-lora-rank is 513"),
        ({"max_batch_size": 0}, "--max-batch-size is 0, expected a whole number 1 or more"),
        ({"max_input_len": 0}, "--max-input-len is 0, expected a whole number 1 or more"),
        ({"max_seq_len": 1}, "--max-seq-len is 1"),
        ({"dtype": "int8"}, "--dtype is 'int8'; choose from: float16, bfloat16, float32"),
        ({"flavour": "trt"}, "--flavour is 'trt'; choose from: auto, tensorrt"),
        ({"target_modules": ()}, "nothing says which modules take LoRA"),
    ],
)
def test_values_that_cannot_be_built_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, tmp_path / "engine", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ("attn_x",)}, "unknown LoRA target module 'attn_x'; choose from: all-"),
        ({"target_modules": ("attn_qkv",)}, "no layer for .* 'attn_qkv'; it has: attn_dense"),
        ({"max_seq_len": 65}, "--max-seq-len is 65, but the model has 64 positions"),
    ],
)
def test_what_this_model_cannot_do_is_refused(
    options: dict[str, Any], message: str, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(tiny_config(tiny_engine.model, tmp_path / "engine", **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model_config", "options", "message"),
    [
        (
            LlamaConfig(),
            {"target_modules": ("c_attn",)},
            r"no layer for .* 'c_attn'; it has: a",
        ),
        (LlamaConfig(), {"max_seq_len": 2049}, r"--max-seq-len is 2049, but the model has 2048"),
        (AriaTextConfig(), {}, r"AriaTextForCausalLM cannot be built: it has experts whose"),
        (MambaConfig(), {}, r"MambaForCausalLM cannot be built: .* state"),
        (LlamaConfig(intermediate_size=-1), {}, r"cannot make a LlamaForCausalLM of .*: \w+Error"),
    ],
    ids=["target", "length", "experts", "state space", "nonsense"],
)
def test_what_config_and_modules_tell_is_refused_before_a_weight_is_read(
    model_config: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model_config.architectures = [
        f"{type(model_config).__name__.removesuffix('Config')}ForCausalLM"
    ]
    model_config.save_pretrained(tmp_path / "model")  # there are no weights to read
    config = tiny_config(tmp_path / "model", tmp_path / "engine", **options)
    for refuse in (build_engine, list_sites):
        with pytest.raises((ConfigError, ModelError), match=message):
            refuse(config)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_sites_of_a_large_model_are_known_without_its_weights(tmp_path: Path) -> None:
    model_config = LlamaConfig(num_hidden_layers=80, architectures=["LlamaForCausalLM"])
    model_config.save_pretrained(tmp_path)
    found = list_sites(tiny_config(tmp_path, tmp_path / "x", target_modules=("down_proj",)))
    assert found.sites[79] == Site("model.layers.79.mlp.down_proj", 11008, 4096, "float32")
    assert (len(found.sites), len(found.left_alone)) == (80, 6 * 80 + 1)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    config = BuildConfig(tmp_path / "no", tmp_path / "engine", ("attn_q",), flavour="none")
    with pytest.raises(ModelError, match=r"no does not exist\. Pass the folder that"):
        build_engine(config)


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"BertForMaskedLM, not a causal language model"):
        build_engine(BuildConfig(tmp_path, tmp_path / "e", ("attn_q",), flavour="none"))


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        build_engine(BuildConfig(tmp_path, tmp_path / "e", ("attn_q",), flavour="none"))


def test_damaged_weights_are_refused(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_engine.model, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        build_engine(tiny_config(model, tmp_path / "engine"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_flavours_fall_back_to_onnx_with_a_note_only_in_auto(
    tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_lora.builder.build.installed_flavour", lambda: None)
    notes = Notes()
    config = tiny_config(tiny_engine.model, tmp_path / "engine", flavour="auto")
    assert quick_build(config, notes).flavour == "none"
    assert "no TensorRT is installed" in notes.notes[0]
