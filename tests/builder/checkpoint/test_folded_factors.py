"""Adapters of an original on a model that AWQ has made of it, against PEFT on the original.

The original is made of the quantised model, by taking back factors, so that nothing is rounded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.quantised import ADAPTER, FOLDER, VOCABULARY
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.folded_factors import folded_factors
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime import open_engine
from trt_lora.scripts.trt_lora_command import main
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

AWQ = FOLDER / "awq_gemm"
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (1, 12))
LAYER, HEAD = "model.layers.0", 32  # values of a head


def factors_like(weight: torch.Tensor) -> torch.Tensor:
    """From 0.3 to 3."""
    return torch.exp(torch.empty(len(weight)).uniform_(-1.2, 1.1))


def unfold(model: Any) -> None:
    """Take back what AWQ would have done; the model computes the same."""
    layer = model.get_submodule(LAYER)
    attention, mlp = layer.self_attn, layer.mlp
    norms = {
        layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
        layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
    }
    for norm, linears in norms.items():
        x = factors_like(norm.weight)
        norm.weight.data *= x
        for linear in linears:
            linear.weight.data /= x
    for rows, columns in ((attention.v_proj, attention.o_proj), (mlp.up_proj, mlp.down_proj)):
        y = factors_like(rows.weight)
        rows.weight.data *= y[:, None]
        groups = columns.in_features // len(y)
        columns.weight.data /= y.reshape(-1, 1, HEAD).repeat(1, groups, 1).reshape(-1)


def original(folder: Path, change: Callable[[Any], None] = lambda model: None) -> Path:
    """The model that the quantised one might have been made of."""
    torch.manual_seed(3)
    model = load_model(Checkpoint(AWQ), "float32")
    with torch.inference_mode():
        unfold(model)
        change(model)
    model.save_pretrained(folder)
    return folder


def convert(adapter: Path, output: Path, *options: object) -> int:
    try:
        main(["convert-adapter", *map(str, (adapter, output, "--format", "peft", *options))])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


@pytest.mark.slow
def test_an_adapter_of_the_original_is_exact_when_it_is_rescaled(tmp_path: Path) -> None:
    base, engine = original(tmp_path / "original"), tmp_path / "engine"
    adapter, output = save_adapter(base, tmp_path / "a", r=4), tmp_path / "rescaled"
    quick_build(tiny_config(AWQ, engine, quantize_level="exact"))
    options = ("--adapter-base", base, "--model", AWQ, "--engine", engine)
    assert convert(adapter, output, *options) == 0
    reference = PeftReference(base, {"a": adapter})
    expected = {name: reference.logits(name, IDS, np.ones_like(IDS)) for name in ("", "a")}
    scale = np.abs(expected["a"]).max()
    with open_engine(engine, "onnxruntime") as running:
        running.adapters.load("a", output)
        running.adapters.load("as it is", adapter, strict=False)
        found = {
            name: engine_logits(running, name, IDS, prompt=8) for name in ("", "a", "as it is")
        }
    assert np.abs(found[""] - expected[""]).max() < 1e-5 * scale
    assert np.abs(found["a"] - expected["a"]).max() < 1e-5 * scale
    assert np.abs(found["as it is"] - expected["a"]).max() > 0.1 * scale


def test_rounding_moves_factors_by_little_and_rows_that_were_not_divided_have_none(
    tmp_path: Path,
) -> None:
    noise = torch.Generator().manual_seed(4)

    def round_weights(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.data *= 1 + 0.1 * torch.randn(weight.shape, generator=noise)

    exact = folded_factors(Checkpoint(original(tmp_path / "exact")), Checkpoint(AWQ))
    noisy = folded_factors(Checkpoint(original(tmp_path / "n", round_weights)), Checkpoint(AWQ))
    assert exact.keys() == noisy.keys()
    assert len(exact) == 7
    for path, factors in exact.items():
        torch.testing.assert_close(noisy[path].x, factors.x, rtol=0.1, atol=0)
        torch.testing.assert_close(noisy[path].y, factors.y, rtol=0.1, atol=0)
        assert bool((factors.x != 1).any())
        assert bool((factors.y == 1).all()) == ("v_proj" not in path and "up_proj" not in path)
    load_model(Checkpoint(AWQ), "float32").save_pretrained(tmp_path / "same")
    same = folded_factors(Checkpoint(tmp_path / "same"), Checkpoint(AWQ))
    assert all(bool((each == 1).all()) for own in same.values() for each in (own.x, own.y))


def test_another_original_is_refused_and_so_are_other_modules(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"q_proj of .*awq_gemm is off by .* it was not quantised"):
        folded_factors(Checkpoint(original(tmp_path / "o", spoil)), Checkpoint(AWQ))
    with pytest.raises(ModelError, match=r"has no model\.layers\.0\.input_layernorm\.w"):
        folded_factors(Checkpoint(save_model("GPT2", tmp_path / "gpt")), Checkpoint(AWQ))


def spoil(model: Any) -> None:
    weight = model.get_submodule(f"{LAYER}.self_attn.q_proj").weight
    weight.data = torch.randn(weight.shape)


@pytest.mark.parametrize("option", ["--adapter-base", "--model"])
def test_one_of_the_options_says_that_the_other_is_missing(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(ADAPTER, tmp_path / "out", option, AWQ) == 2
    assert "rescale an adapter; pass both" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
