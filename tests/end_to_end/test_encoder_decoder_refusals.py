"""What an encoder-decoder refuses: sources, damaged engines, options, and what knows no source."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import trt_lora
from support.models.encoder_decoders import VOCABULARY, Built, save_encoder_decoder
from support.models.tiny_models import save_model
from support.refusals import refused

from trt_lora.builder import BuildConfig
from trt_lora.builder.build import list_sites
from trt_lora.plugins.errors import ConfigError, LoRAError, ManifestError, ModelError
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.interfaces.vllm.llm import LLM
from trt_lora.runtime.scaleout.dynamo_options import DynamoOptions
from trt_lora.runtime.scaleout.triton.settings import Settings
from trt_lora.runtime.scaleout.worker_engine import WorkerEngine

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),  # PEFT's
]


@pytest.fixture
def engine(t5: Built) -> Iterator[Engine]:
    with open_engine(t5.folder / "engine", "onnxruntime") as engine:
        yield engine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sources": [5] * 1025}, ("1025 tokens", "1 to 1024", "--max-source-len")),
        ({"sources": [[]]}, ("0 tokens", "1 to 1024")),
        ({"sources": [VOCABULARY]}, ("source holds token id 128",)),
        ({"sources": np.zeros((8, 24), np.float32)}, ("source",)),
        ({"prompts": [0]}, ("no source", "encoder-decoder", "sources=")),
        ({}, ("there is no prompt",)),
        ({"prompts": [[0], [0]], "sources": [[5]]}, ("1 sources for 2 prompts",)),
    ],
)
def test_a_wrong_source_is_refused(
    engine: Engine, given: dict[str, Any], said: tuple[str, ...]
) -> None:
    with refused(ConfigError, *said):
        engine.generate(**given)


def test_an_encoder_and_a_step_need_each_other(t5: Built, tmp_path: Path) -> None:
    for missing in ("encoder.onnx", "model.onnx", "encoder.plan", "engine.plan"):
        copy = shutil.copytree(t5.folder / "engine", tmp_path / missing)
        (copy / missing).unlink()
        with refused(ManifestError, missing, "incomplete"):
            open_engine(copy, "onnxruntime")


def test_a_graph_of_another_engine_is_refused(t5: Built, tmp_path: Path) -> None:
    for other in ("encoder.onnx", "model.onnx"):
        copy = shutil.copytree(t5.folder / "engine", tmp_path / other)
        shutil.copy(t5.folder / "slots" / other, copy / other)
        with refused(ManifestError, other):
            open_engine(copy, "onnxruntime")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m | {"encoder": None}, "an input cross.0.key, and no encoder"),
        (lambda m: m["encoder"].update(max_source_len=9) or m, "no 9 positions"),
        (lambda m: m["encoder"].update(outputs=[]) or m, "encoder writes 0 values"),
    ],
)
def test_a_manifest_that_speaks_of_another_encoder_is_refused(
    t5: Built, tmp_path: Path, change: Any, said: str
) -> None:
    copy = shutil.copytree(t5.folder / "engine", tmp_path / "engine")
    manifest = copy / "manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with refused(ManifestError, said):
        open_engine(copy, "onnxruntime")


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "ENGINE"],
        ["bench", "ENGINE", "--ranks", "4"],
        ["compare", "ENGINE", "--against", "onnxruntime"],
        ["verify", "ENGINE", "--model", "MODEL", "--adapter", "ADAPTER"],
        ["serve", "ENGINE", "--port", "0"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_knows_no_source_says_so(
    t5: Built, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"ENGINE": "engine", "MODEL": "model", "ADAPTER": "all"}
    given = [str(t5.folder / places[word]) if word in places else word for word in words]
    said = trt_lora(capsys, *given, expected=2)
    assert "is an encoder-decoder; call Engine.generate(sources=...)" in said


@pytest.mark.parametrize(
    "opened",
    [
        lambda engine: LLM(str(engine), backend="onnxruntime"),
        lambda engine: WorkerEngine(DynamoOptions(engine, backend="onnxruntime")),
        lambda engine: Settings(str(engine), backend="onnxruntime").open(),
    ],
    ids=["vllm", "dynamo", "triton"],
)
def test_a_face_that_knows_no_source_says_so(t5: Built, opened: Callable[[Path], object]) -> None:
    with refused(ConfigError, "is an encoder-decoder; call Engine.generate(sources=...)"):
        opened(t5.folder / "engine")


# --------------------------------------------------------------------------- builds


def refuse_build(model: Path, kind: type[LoRAError], *said: str, **options: Any) -> None:
    with refused(kind, *said):
        options = {"target_modules": ("all-linear",), "dtype": "float32"} | options
        list_sites(BuildConfig(model=model, output=model / "engine", **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int8"}, "--quantize int8 is for decoders alone"),
        ({"lora_vectors": True}, "--lora-vectors is for decoders alone"),
        ({"lora_plugin": "aot"}, "--lora-plugin aot is for decoders alone"),
        ({"lora_saved_modules": ("lm_head",)}, "--lora-saved-modules is for decoders alone"),
    ],
)
def test_an_option_for_decoders_is_refused(t5: Built, options: dict[str, Any], said: str) -> None:
    refuse_build(t5.folder / "model", ConfigError, said, **options)


def test_float16_is_refused_where_a_graph_cannot_do_what_the_model_does(
    t5: Built, tmp_path: Path
) -> None:
    said = "wo would overflow in float16; pass --dtype bfloat16 for a GPU, or float32"
    refuse_build(t5.folder / "model", ModelError, said, dtype="float16")
    for name in ("Bart", "Marian"):
        save_encoder_decoder(name, tmp_path / name)
        refuse_build(tmp_path / name, ModelError, "looks for infinities", dtype="float16")


def test_the_length_of_sources_is_that_of_the_model(tmp_path: Path) -> None:
    decoder, said = save_model("Llama", tmp_path / "llama"), "has no encoder"
    refuse_build(decoder, ConfigError, said, max_source_len=9)
    for name, said in (("Whisper", "12 positions;"), ("Bart", "64 positions at most")):
        save_encoder_decoder(name, tmp_path / name)
        refuse_build(tmp_path / name, ConfigError, said, max_source_len=65)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decoder_start_token_id": None}, "an answer begins behind one token"),
        ({"forced_bos_token_id": 1000}, "forced_bos_token_id is 1000, expected tokens"),
    ],
)
def test_a_rule_that_is_no_token_is_refused(
    t5: Built, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    model = shutil.copytree(t5.folder / "model", tmp_path / "model")
    for name in ("generation_config.json", "config.json"):
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    refuse_build(model, ModelError, said)


def test_a_decoder_is_given_no_source(tiny_engine: Any) -> None:
    with (
        open_engine(tiny_engine.engine, "onnxruntime") as engine,
        refused(ConfigError, "is a decoder, which reads none"),
    ):
        engine.generate([1], sources=[2])
