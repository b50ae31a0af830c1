"""`trt-lora compare`: its tables, its exit status, and the folder that it keeps."""

import importlib.metadata
import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.compare_command import ONNXRT, compare
from support.fakes.planted_faults import copy_of, cross_wires
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.runtime.manifest import MANIFEST_FILE
from trt_lora.scripts.comparison.files import load_accuracy

Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))


@pytest.mark.slow
def test_a_comparison_is_kept_with_all_that_it_found(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, adapter = tmp_path / "kept", f"a={tiny_engine.adapter}"
    assert compare(tiny_engine.engine, "--adapter", adapter, "--keep", kept) == 0
    printed = capsys.readouterr()
    assert re.findall("^.*vs.*$", printed.err, re.M) == [
        "base: onnxrt vs merged",
        "a: onnxrt vs merged",
    ]
    turns = re.findall(r"^(\w+): command (\d) of (\d)$", printed.err, re.M)
    assert turns == [(c, str(n), "4") for c in ("base", "a") for n in (1, 2, 3, 4)]
    header, base, adapted, last = printed.out.splitlines()
    assert cells(header)[:3] == ["engine", "compared with", "adapter"]
    assert cells(base)[:5] == [ONNXRT, f"merged weights, {ONNXRT}", "base", "10", "0.00e+00"]
    assert cells(adapted)[2] == "a"
    assert 0 < float(cells(adapted)[4]) < 1e-4
    assert last == f"tolerance 0.001, relative 0.0001; kept in {kept}"
    assert not (kept / "models").exists()

    report = json.loads((kept / "report.json").read_text())
    assert report["versions"]["polygraphy"] == importlib.metadata.version("polygraphy")
    assert set(report["adapters"]["a"]) >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (kept / MANIFEST_FILE).read_bytes() == (tiny_engine.engine / MANIFEST_FILE).read_bytes()
    # That its commands run again elsewhere is shown by test_comparing_docs.py.
    errors = load_accuracy(kept / "accuracy" / "a.json").errors
    assert 0 < max(error.largest for error in errors) < 1e-4


def cells(line: str) -> list[str]:
    """The cells of a line of the table."""
    return re.split(" {2,}", line.strip())


@pytest.mark.slow
def test_float64_agrees_with_the_engine(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ("--adapter", f"a={tiny_engine.adapter}", "--json")
    native = ("--against", "native", "--keep", tmp_path / "native")
    assert compare(tiny_engine.engine, *adapter, *native) == 0
    report = json.loads(capsys.readouterr().out)
    assert "the engine has no plan" in report["note"]
    assert {row["reference"] for row in report["rows"]} == {f"LoRA in float64, {ONNXRT}"}
    assert [row["largest"] < 1e-4 for row in report["rows"]] == [True] * 2


@pytest.mark.slow
def test_another_build_in_another_dtype_with_other_names_and_limits_agrees(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "dtype": "float16",
        "binding_names": BindingNames.EDGELLM,
        "max_batch_size": 1,
    }
    config = tiny_config(
        tiny_engine.model, tmp_path / "half", target_modules=("attn_q", "attn_v"), **options
    )
    quick_build(replace(config, max_input_len=8))
    against = ("--against", tmp_path / "half", "--keep", tmp_path / "kept", "--json")
    assert compare(tiny_engine.engine, "--adapter", f"a={tiny_engine.adapter}", *against) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tolerance"] == {"absolute": 0.5, "relative": 0.05}
    assert all(1e-5 < row["largest"] < 0.1 for row in report["rows"])
    assert {row["reference"] for row in report["rows"]} == {f"the other engine, {ONNXRT}"}


@pytest.mark.slow
def test_a_difference_is_named_and_exits_with_1(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = copy_of(tiny_engine.engine, tmp_path / "wrong")
    cross_wires(wrong, Q1, Q0)
    kept = ("--keep", tmp_path / "kept", "--bisect")
    assert compare(wrong, "--adapter", f"a={tiny_engine.adapter}", *kept) == 1
    _, base, adapted, fault, _ = capsys.readouterr().out.splitlines()
    assert base.endswith("-")
    assert adapted.endswith("logits (prefill)")
    assert fault.startswith(
        f"a: the first site that differs is {Q1} (rank 4, scale 2, A [32, 4], B [4, 32]): its delta"
    )
    rows = json.loads((tmp_path / "kept" / "report.json").read_text())["rows"]
    assert [row["same"] for row in rows] == [True, False]
    assert rows[1]["site"].items() >= {"path": Q1, "rank": 4, "cause": "its delta differs"}.items()


@pytest.mark.slow
def test_an_adapter_that_changes_nothing_proves_nothing_and_exits_with_1(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "a" / "adapter_model.safetensors"
    shutil.copytree(tiny_engine.adapter, weights.parent)
    tensors = load_file(weights)
    save_file({n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}, weights)
    config = weights.parent / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "some/base"}
    config.write_text(json.dumps(fields))
    kept = ("--keep", tmp_path / "kept")
    assert compare(tiny_engine.engine, "--adapter", f"a={weights.parent}", *kept) == 1
    printed = capsys.readouterr().err.splitlines()
    assert "error: a changes no output, so that nothing was compared" in printed
    assert sum("names 'some/base' as its base model" in line for line in printed) == 1
