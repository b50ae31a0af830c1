"""GPUs that a plan is for: passed on to TensorRT-RTX, in the manifest, or refused beforehand."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TinyEngine
from support.models.quantised import FOLDER
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder import build
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.plugins.tensorrt.flavour import Flavour
from trt_lora.scripts.terminal.engine_facts import engine_facts

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

RTX: dict[str, Any] = {"flavour": "tensorrt-rtx", "dtype": "float16"}


@pytest.mark.slow
def test_the_manifest_and_inspect_say_what_a_plan_is_for(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    options = RTX | {"compute_capability": ("8.9", "12.0")}
    manifest = quick_build(tiny_config(tiny_engine.model, engine, **options))
    assert manifest.compute_capability == ("8.9", "12.0")
    plan = engine_facts(engine, manifest)["plan"]
    assert plan == "tensorrt-rtx, LoRA as plugin, for compute capability 8.9 and 12.0"


@pytest.mark.slow
def test_tensorrt_is_told(tmp_path: Path) -> None:
    """What the GPU lacks it refuses itself."""
    options = RTX | {"compute_capability": ("7.5",), "lora_plugin": "native"}
    with pytest.raises(ModelError, match=r"sm75, because .* HW-specific datatypes: int4"):
        quick_build(tiny_config(FOLDER / "gptq_sym", tmp_path / "engine", **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flavour": "none"}, "8.9: no plan is made; pass --flavour tensorrt-rtx"),
        ({"compute_capability": ("8.9", "9.0")}, r"9.0: tensorrt-rtx compiles for: 7.5, 8.0, .*9"),
        ({"compute_capability": ("sm89",)}, "sm89: tensorrt-rtx compiles for: "),
        ({"compute_capability": ("7.5",)}, "7.5: our kernels run on 8.0 and later; pass --lora-p"),
        (
            {"compute_capability": ("7.5",), "lora_plugin": "native", "quantize": "int4"},
            "7.5: tensorrt-rtx multiplies by 4 bits on 8.0 and later; pass --quantize int8",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_export(
    options: dict[str, Any], reason: str, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    fields = RTX | {"compute_capability": ("8.9",)} | options
    with pytest.raises(ConfigError, match=f"--compute-capability {reason}"):
        quick_build(tiny_config(tiny_engine.model, tmp_path / "engine", **fields))


def test_full_tensorrt_compiles_for_its_own_gpu(
    tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Flavour("tensorrt", "math", extra="tensorrt", has_timing_cache=True)
    monkeypatch.setattr(build, "flavour_named", lambda _: full)
    options = RTX | {"flavour": "tensorrt", "compute_capability": ("8.9",)}
    with pytest.raises(ConfigError, match=r"8\.9: tensorrt compiles for the GPU that it runs on; "):
        quick_build(tiny_config(tiny_engine.model, tmp_path / "engine", **options))
