"""`trt-lora inspect`: every tensor and every binding in the report, and what the engine takes."""

import json
from pathlib import Path

import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.commands import trt_lora
from support.models.padding_plan import with_padding_plan
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.scripts.trt_lora_command import main

Q = "model.layers.0.self_attn.q_proj"


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str | Path, expected: int = 0) -> str:
    return trt_lora(capsys, "inspect", *arguments, expected=expected)


def test_an_engine_says_what_it_takes(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = inspect(capsys, tiny_engine.engine)
    assert "LlamaForCausalLM" in printed
    assert "1 to 16" in printed
    assert "4: q_proj x 2, v_proj x 2" in printed


@pytest.mark.slow
def test_the_kernels_of_every_layout_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    model = save_model("Llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    quick_build(tiny_config(model, tmp_path / "engine", dtype="float16"))
    engine = tmp_path / "engine"
    printed = inspect(capsys, engine, "--kernels").splitlines()
    prefill = json.loads(inspect(capsys, engine, "--kernels", "--profile", "prefill", "--json"))
    # By the engine's own number, so that a report of this list names the right profile.
    assert {kernel["profile"] for layout in prefill for kernel in layout["kernels"]} == {1}
    decode = {row[:20].strip(): row[20:].split() for row in printed[1:5]}
    assert printed[0].split()[0] == "decode"
    assert list(decode) == [
        "without LoRA",
        "plugin",
        "native, dynamic rank",
        "native, rank 16 fixe",
    ]
    added = {name: float(row[-3]) for name, row in decode.items()}
    copies = {name: int(row[-2]) for name, row in decode.items()}
    assert added["plugin"] <= 4
    assert copies["plugin"] == 0
    assert added["native, dynamic rank"] >= 25
    assert copies["native, dynamic rank"] == 2 * 7 * 2


def test_kernels_of_an_engine_without_sites_cannot_be_counted(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = engine_without_lora(tiny_engine.engine, tmp_path)
    assert "has no LoRA sites" in inspect(capsys, plain, "--kernels", expected=2)


def test_a_profile_that_is_not_there_is_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = inspect(capsys, tiny_engine.engine, "--kernels", "--profile", "decod", expected=2)
    assert "no profile 'decod'; this engine has decode, prefill" in printed


def test_every_tensor_and_every_binding_is_in_the_report(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = inspect(capsys, tiny_engine.engine, "--adapter", tiny_engine.adapter, "--full")
    for name in load_file(tiny_engine.adapter / "adapter_model.safetensors"):
        path, factor = name.removeprefix("base_model.model.").split(".lora_")
        assert f"  lora_{factor[0]}_{path} <- {name}\n" in printed
    assert f"{Q}: rank 4, scale 2, " in printed
    assert "the engine takes it; 8 tensors bound, 0 not, 0 ignored; 4 of 4 sites adapted" in printed


def test_what_is_not_bound_is_listed_with_the_reason_and_ends_with_1(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = save_adapter(tiny_engine.model, tmp_path / "a", target_modules=["q_proj", "up_proj"])
    printed = inspect(capsys, tiny_engine.engine, "--adapter", adapter, "--full", expected=1)
    assert "not bound: base_model.model.model.layers.0.mlp.up_proj.lora_A.weight: " in printed
    assert "model.layers.1.self_attn.v_proj: dummy" in printed
    assert (
        "the engine refuses it; 4 tensors bound, 4 not, 0 ignored; 2 of 4 sites adapted" in printed
    )


def test_a_layer_that_the_file_lacks_is_a_warning(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = load_file(tiny_engine.adapter / "adapter_model.safetensors")
    kept = {name: value for name, value in kept.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    config = tiny_engine.adapter / "adapter_config.json"
    (tmp_path / config.name).write_bytes(config.read_bytes())
    main(["inspect", str(tiny_engine.engine), "--adapter", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    targeted = "the adapter's config targets model.layers.1.self_attn.q_proj, "
    assert line.startswith(f"warning: {tmp_path}: {targeted}")


def test_a_report_can_be_read_by_a_program(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = json.loads(inspect(capsys, tiny_engine.engine, "--json"))
    assert engine["max_lora_rank"] == 16
    report = json.loads(
        inspect(capsys, tiny_engine.engine, "--adapter", tiny_engine.adapter, "--json")
    )
    assert report["bindings"][f"lora_A_{Q}"] == [f"base_model.model.{Q}.lora_A.weight"]
    assert report["bound"][f"base_model.model.{Q}.lora_B.weight"] == [f"lora_B_{Q}"]
    assert [site["rank"] for site in report["sites"]] == [4] * 4


def test_what_is_no_engine_or_no_adapter_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not an engine directory" in inspect(capsys, tmp_path, expected=2)
    message = inspect(capsys, tiny_engine.engine, "--adapter", tmp_path / "x", expected=2)
    assert "does not exist" in message


def test_the_bytes_of_an_adapter_are_those_in_the_executor_that_is_named(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter of rank 4; the plugin reads it with rank 8, ONNX Runtime as it is."""
    plan = with_padding_plan(tiny_engine.engine, tmp_path / "plan")
    found: dict[str, int] = {}
    for engine in (tiny_engine.engine, plan):
        arguments = (engine, "--adapter", tiny_engine.adapter)
        report = json.loads(inspect(capsys, *arguments, "--json"))
        nbytes = found[report["executor"]] = sum(site["nbytes"] for site in report["sites"])
        assert f", {nbytes} bytes in {report['executor']}" in inspect(capsys, *arguments)
    values = load_file(tiny_engine.adapter / "adapter_model.safetensors").values()
    nbytes = sum(array.nbytes for array in values)
    assert found == {"ONNX Runtime": nbytes, "TensorRT": 2 * nbytes}


@pytest.mark.parametrize("option", [["--full"], ["--profile", "decode"]])
def test_an_option_without_the_one_that_it_is_for_is_refused(
    option: list[str], tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = inspect(capsys, tiny_engine.engine, *option, expected=2)
    assert f"{option[0]} is of --" in printed
