"""The command `build-engine`: what it prints, and how it refuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.models.checkpoints import in_hub_cache, with_file, with_weights
from support.models.quick_build import shared_traces

from trt_lora.builder.targets import SiteList
from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime import read_manifest
from trt_lora.scripts.build_engine import main
from trt_lora.scripts.terminal.build_options import build_config, build_parser, pipeline_config
from trt_lora.scripts.terminal.console import INTERRUPTED
from trt_lora.scripts.terminal.site_report import print_sites, sites_as_json
from trt_lora.scripts.terminal.trtllm_options import IGNORED

SMALL = ["--max-input-len", "32", "--max-seq-len", "64", "--dtype", "float32", "--flavour", "none"]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the command, which must exit with 2, and return its message: one line, no traceback."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def test_the_command_builds_and_says_what_it_built(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engine"
    targets = ["--lora_target_modules", "attn_q", "attn_v", "--max_lora_rank=8"]  # TRT-LLM's way
    with shared_traces():
        main(["--model", str(tiny_engine.model), "--output_dir", str(output), *targets, *SMALL])
    assert f"{output}: 4 LoRA sites, rank 1 to 8, float32, none" in capsys.readouterr().out
    assert read_manifest(output).max_lora_rank == 8


def dry_run(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """The lines that a dry run prints."""
    main(["--model", str(model), *SMALL, "--dry-run", *options])
    return capsys.readouterr().out.splitlines()


def test_the_dry_run_has_a_line_for_every_kind_of_linear(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(tiny_engine.model, capsys, "--lora-target-modules", "q_proj", "v_proj")
    assert [line.split() for line in lines[:3]] == [
        ["linear", "module", "k", "n", "sites", "layers"],
        ["self_attn.q_proj", "attn_q", "32", "32", "2", "0-1"],
        ["self_attn.v_proj", "attn_v", "32", "16", "2", "0-1"],
    ]
    assert "left alone: mlp.up_proj x 2: mlp_gate is not a target" in lines
    assert lines[-1] == "4 sites, 11 left alone"
    assert len(lines) == 10


def test_the_verbose_dry_run_has_a_line_for_every_linear(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(tiny_engine.model, capsys, "--lora-target-modules", "v_proj", "--verbose")
    assert "model.layers.1.self_attn.v_proj  attn_v  k=32 n=16" in lines
    assert "left alone: model.layers.0.mlp.up_proj: mlp_gate is not a target" in lines
    assert lines[-1] == "2 sites, 13 left alone"
    assert len(lines) == 16


def test_a_config_file_alone_is_enough(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "build.toml"
    file.write_text(
        f'model = "{tiny_engine.model}"\nlora_target_modules = ["q_proj"]\ndry-run = true\n'
        'max-input-len = 32\nmax-seq-len = 64\nflavour = "none"\ngemm-plugin = "auto"\n'
    )
    main(["--config", str(file)])
    printed = capsys.readouterr()
    assert printed.out.endswith("2 sites, 13 left alone\n")
    because = IGNORED["--gemm-plugin"]
    assert printed.err == f"note: {file}: --gemm-plugin is left out: {because}\n"


def test_options_of_tensorrt_llm_that_mean_nothing_are_one_note(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = ["--gemm_plugin", "auto", "--context_fmha", "enable", "--paged_kv_cache", "enable"]
    message = refusal(capsys, "--model", str(tiny_engine.model), *theirs)
    note, error = message.splitlines()
    assert note.startswith("note: --gemm-plugin is left out: TensorRT chooses")
    assert "; --context-fmha is left out: " in note
    assert "; --paged-kv-cache is left out: " in note
    assert error.startswith("error: nothing says which modules take LoRA")


def test_a_dry_run_in_json_has_every_linear(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = dry_run(tiny_engine.model, capsys, "--lora-target-modules", "v_proj", "--json")
    found = json.loads("\n".join(lines))
    path = "model.layers.1.self_attn.v_proj"
    assert {"path": path, "module": "attn_v", "k": 32, "n": 16} in found["sites"]
    assert (len(found["sites"]), len(found["left_alone"])) == (2, 13)
    assert all(item["path"] and item["reason"] for item in found["left_alone"])


def test_a_build_in_json_is_one_object(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = read_manifest(tiny_engine.engine)
    monkeypatch.setattr("trt_lora.scripts.build_engine.build_engine", lambda *_: made)
    targets = ["--lora-target-modules", "attn_q", "--output", "e"]
    main(["--model", str(tiny_engine.model), *targets, *SMALL, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["output"], found["sites"], found["max_lora_rank"]) == ("e", 4, 16)
    assert found["size_bytes"] == sum(record.size_bytes for record in made.files.values())


def test_layers_of_other_widths_have_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    widths = {0: 8, 1: 8, 2: 16, 4: 8, 7: 8}
    sites = [Site(f"h.{layer}.mlp.fc1", 4, n, "float32") for layer, n in widths.items()]
    print_sites(SiteList((*sites, Site("head.odd", 4, 9, "float32")), ()), verbose=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:4]] == [
        ["mlp.fc1", "mlp_h_to_4h", "4", "8", "4", "0-1,", "4,", "7"],
        ["mlp.fc1", "mlp_h_to_4h", "4", "16", "1", "2"],
        ["head.odd", "-", "4", "9", "1", "-"],
    ]


def test_sites_of_experts_say_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site("h.0.mlp.experts.down_proj", 4, 9, "float32", experts=8)
    listing = SiteList((site,), ())
    print_sites(listing, verbose=False)
    print_sites(listing, verbose=True)
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == [
        "mlp.experts.down_proj",
        "moe_4h_to_h",
        *["8", "x", "4", "9", "1", "0"],
    ]
    assert said[3] == "h.0.mlp.experts.down_proj  moe_4h_to_h  k=4 n=9 of 8 experts"
    assert sites_as_json(listing)["sites"][0]["experts"] == 8


def test_the_help_has_every_default() -> None:
    said = " ".join(build_parser().format_help().split())
    for default in ("8", "lora", "float16", "auto"):
        assert f"(default: {default})" in said
    assert "(default: 1024, or --max-seq-len if that is less)" in said
    assert "(default: 2048, or twice --max-input-len" in said
    assert "(default: that of --lora-dir, else 64)" in said
    for empty in ("None", "False", "()"):
        assert empty not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-target-modules", "attn_x"], "unknown LoRA target module 'attn_x'; choose from:"),
        (["--flavour", "tensorrt", "--lora-target-modules", "q_proj"], "trt-lora[tensorrt]"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(
    options: list[str],
    message: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", str(tiny_engine.model), "--output", str(tmp_path / "e"), *SMALL, *options]
    assert message in refusal(capsys, *argv)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(tmp_path / "no"), "--output", str(tmp_path / "e")]
    message = refusal(capsys, *argv, "--lora-target-modules", "attn_q", "--flavour", "none")
    assert "no does not exist. Pass the folder that save_pretrained wrote" in message


def test_an_existing_output_is_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(tiny_engine.model), "--output", str(tiny_engine.engine), *SMALL]
    assert "exists; choose another --output" in refusal(capsys, *argv, "--lora-target-modules", "q")
    assert read_manifest(tiny_engine.engine).sites


def test_abbreviated_options_are_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --lora-target" in refusal(
        capsys, "--model", "m", "--lora-target", "attn_q"
    )


@pytest.mark.slow
def test_a_build_that_is_ended_exits_as_a_shell_expects_and_leaves_no_half_engine(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    """By Ctrl-C; test_console.py has SIGTERM."""
    command = [sys.executable, "-m", "trt_lora.scripts.build_engine"]
    argv = ["--model", str(tiny_engine.model), "--output", str(tmp_path / "engine"), *SMALL]
    build = subprocess.Popen(
        [*command, *argv, "--lora-target-modules", "attn_q"],
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background has Ctrl-C switched off, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert build.stderr is not None
    assert "export\n" in iter(build.stderr.readline, "")  # it is under way
    assert list(tmp_path.iterdir())  # the scratch directory
    build.send_signal(signal.SIGINT)
    _, said = build.communicate(timeout=60)
    assert build.returncode == INTERRUPTED == 128 + signal.SIGINT
    assert said.rstrip().endswith("error: interrupted; no file was written")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


TARGETS = ["--lora-target-modules", "attn_q", "attn_v", "--max-lora-rank", "16"]


def test_a_model_in_the_hubs_cache_is_built(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    model = with_file(tiny_engine.model, tmp_path / "copy", "tokenizer.json", "{}")
    snapshot = in_hub_cache(model, tmp_path / "cache", "org/name")
    output = tmp_path / "engine"
    with shared_traces():
        main(["--model", str(snapshot), "--output", str(output), *TARGETS, *SMALL])
    manifest, plain = read_manifest(output), read_manifest(tiny_engine.engine)
    assert manifest.base_model.name == "org/name"
    assert manifest.base_model.fingerprint == plain.base_model.fingerprint
    assert manifest.files["model.onnx.data"] == plain.files["model.onnx.data"]  # the same weights
    assert (output / "tokenizer.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in output.iterdir())


def test_an_engine_without_an_output_is_named_as_its_model_in_the_hubs_cache(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    snapshot = in_hub_cache(tiny_engine.model, tmp_path, "org/name")
    args = build_parser().parse_args(["--model", str(snapshot), *TARGETS])
    assert build_config(args).output == Path("engines/name")


def test_engines_without_an_output_are_named_as_their_folder_whatever_dots_it_has(
    tmp_path: Path,
) -> None:
    pipeline = tmp_path / "FLUX.1-dev"
    (pipeline / "unet.2").mkdir(parents=True)
    (pipeline / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (pipeline / "unet.2" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    (tmp_path / "a.b.onnx").touch()
    whole, part, graph = (
        build_parser().parse_args([*words, *TARGETS])
        for words in (
            ["--model", str(pipeline)],
            ["--model", str(pipeline / "unet.2")],
            ["--onnx", str(tmp_path / "a.b.onnx")],
        )
    )
    config = pipeline_config(whole)
    assert config is not None
    assert config.graph.output == Path("engines/FLUX.1-dev")
    assert build_config(part).output == Path("engines/unet.2")
    assert build_config(graph).output == Path("engines/a.b")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda m, d: with_weights(m, d, lambda w: {f"module.{k}": w[k] for k in w}), "missing ("),
        (lambda m, d: with_file(m, d, "config.json", "{"), "config.json is not JSON"),
    ],
)
def test_a_damaged_model_is_refused_on_one_line(
    fault: Callable[[Path, Path], Path],
    message: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of its weights, and of its files; the tests of builder/checkpoint have each."""
    model, output = fault(tiny_engine.model, tmp_path / "m"), tmp_path / "e" / "engine"
    error = refusal(capsys, "--model", str(model), "--output", str(output), *TARGETS, *SMALL)
    *stages, line = error.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not any("rror" in stage for stage in stages)
    assert not output.exists()
