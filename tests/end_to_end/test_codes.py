"""The real model in codes of 8 and of 4 bits: how far its answers are from the float model's."""

from pathlib import Path
from typing import Any

import pytest
from support.models.quick_build import quick_build

from trt_lora.builder import BuildConfig
from trt_lora.builder.quantising.quantise import TEXT
from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE
from trt_lora.scripts.verification.accuracy import accuracy, text_windows
from trt_lora.scripts.verification.peft_reference import PeftReference

FLOAT_BYTES = 538_584_320  # of the float32 engine's weights
SHORT = 14_000  # characters: a quarter of the text, for a test


@pytest.mark.slow
def test_codes_keep_the_answers_of_the_base_model_and_of_an_adapter(
    demo_model: Path, demo_adapters: dict[str, Path], tmp_path: Path
) -> None:
    (text := tmp_path / "text.txt").write_text(TEXT.read_text(encoding="utf-8")[:SHORT])
    reference = PeftReference(demo_model, demo_adapters, attention="sdpa")
    # With all of the text, 4 bits have a divergence of 0.07 and 0.10; rounded, of 0.27 and 0.35.
    limits = {"int8": (0.006, 0.0065, 0.29), "int4": (0.1, 0.13, 0.2)}
    for quantize, (base, adapted, size) in limits.items():
        directory = tmp_path / quantize
        calibration = text if quantize == "int4" else None
        options: dict[str, Any] = {"dtype": "float32", "flavour": "none", "quantize": quantize}
        manifest = quick_build(
            BuildConfig(demo_model, directory, ("all-linear",), calibration=calibration, **options)
        )
        assert len(manifest.weights) == 211
        assert manifest.files[ONNX_WEIGHTS_FILE].size_bytes < size * FLOAT_BYTES
        with open_engine(directory, "onnxruntime") as engine:
            engine.adapters.load("pirate", demo_adapters["pirate"])
            windows = text_windows(engine, None)[:2]
            for name, limit in (("", base), ("pirate", adapted)):
                found = accuracy(engine, name, reference, windows)
                assert (found.adapter, found.tokens) == (name, 1024)
                assert 0 < found.divergence < limit
                assert found.same_best > (0.95 if quantize == "int8" else 0.8)
                assert found.perplexity == pytest.approx(found.float_perplexity, rel=0.12)
            engine.adapters.load("letter", demo_adapters["letter"])
            answer = engine.generate("Name a fruit.", adapter="letter").text
        assert answer.startswith("Dear")
