"""Second moments of what the linears of a model read, against the layers' own inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny_models import ARCHITECTURES, save_model
from transformers import AutoModelForCausalLM

from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.quantising import moments
from trt_lora.builder.quantising.moments import Moments, SharedInput
from trt_lora.plugins.errors import ModelError

WINDOWS = [[1, 5, 3, 8], [2, 9, 4, 7], [6, 3]]


def load(folder: Path, architecture: str = "Llama", attention: str = ATTENTION) -> Any:
    directory = folder / architecture
    if not directory.exists():
        save_model(architecture, directory)
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    ).eval()


def test_linears_that_read_one_tensor_share_its_moments(tmp_path: Path) -> None:
    inputs = Moments(load(tmp_path), WINDOWS).inputs()
    layer = [
        (32, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (32, ["self_attn.o_proj"]),
        (32, ["mlp.gate_proj", "mlp.up_proj"]),
        (48, ["mlp.down_proj"]),
    ]
    expected = [
        SharedInput(k, [f"model.layers.{number}.{name}" for name in names])
        for number in (0, 1)
        for k, names in layer
    ]
    assert inputs == expected  # the head is not the decoder's


def test_the_largest_of_an_input_is_that_of_all_that_read_it(tmp_path: Path) -> None:
    model = load(tmp_path)
    found = Moments(model, WINDOWS)
    largest = found.largest(found.inputs())
    assert len(largest) == 2 * 7
    for path, value in largest.items():
        seen: list[float] = []
        hook = model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, to=seen: to.append(float(args[0].abs().max()))
        )
        with torch.inference_mode():
            for window in WINDOWS:
                model(torch.tensor([window]))
        hook.remove()
        assert value == pytest.approx(max(seen), rel=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moments_are_those_of_the_inputs_that_eager_attention_gives(
    architecture: str, tmp_path: Path
) -> None:
    found = Moments(load(tmp_path, architecture), WINDOWS)
    model = load(tmp_path, architecture, "eager")
    for item, squares in found.of(found.inputs()):
        seen: list[torch.Tensor] = []
        module = model.get_submodule(item.paths[0])
        hook = module.register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0]))
        with torch.inference_mode():
            for window in WINDOWS:
                model(torch.tensor([window]))
        hook.remove()
        rows = torch.cat([x.reshape(-1, item.k) for x in seen]).double()
        torch.testing.assert_close(squares.double(), rows.T @ rows / 10, rtol=1e-4, atol=1e-6)


def test_memory_decides_how_often_the_text_is_read_and_not_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs = load(tmp_path), list[int]()
    found = Moments(model, WINDOWS)
    inputs = found.inputs()
    all_at_once = [squares for _, squares in found.of(inputs)]
    monkeypatch.setattr(moments, "_PASS_BYTES", 2 * 4 * 32 * 32)
    model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    parts = list(found.of(inputs))
    # Two of 32, or one of 48, which is larger than is allowed: 3 passes for a layer.
    assert len(runs) == 2 * 3 * len(WINDOWS)
    assert [item for item, _ in parts] == inputs
    for (_, squares), expected in zip(parts, all_at_once, strict=True):
        torch.testing.assert_close(squares, expected)


def test_of_wide_inputs_the_diagonal_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Moments(load(tmp_path), WINDOWS)
    whole = [squares for _, squares in found.of(found.inputs())]
    monkeypatch.setattr(moments, "_WIDEST", 40)
    for (item, squares), expected in zip(found.of(found.inputs()), whole, strict=True):
        assert squares.dim() == (1 if item.k == 48 else 2)
        kept = expected.diagonal() if item.k == 48 else expected
        torch.testing.assert_close(squares, kept)


def test_a_module_that_is_called_twice_has_the_moments_of_both_calls(tmp_path: Path) -> None:
    model = load(tmp_path)
    layers = model.get_decoder().layers
    layers[1].mlp.down_proj = layers[0].mlp.down_proj
    found = Moments(model, WINDOWS)
    inputs = found.inputs()
    (down,) = [item for item in inputs if item.k == 48]
    assert down.paths == ["model.layers.0.mlp.down_proj"]
    squares = found._measured(inputs)
    apart = Moments(load(tmp_path), WINDOWS)
    first = next(squares for item, squares in apart.of(apart.inputs()) if item.k == 48)
    assert squares[down.paths[0]].trace() > first.trace()  # the first call's, and the second's


def test_a_model_that_cannot_be_run_is_refused_and_keeps_no_hook(tmp_path: Path) -> None:
    model = load(tmp_path)
    with pytest.raises(
        ModelError, match=r"cannot be run on a text: IndexError.*pass --quantize int8"
    ):
        Moments(model, [[10**6, 1]]).inputs()
    assert all(not module._forward_pre_hooks for module in model.modules())
