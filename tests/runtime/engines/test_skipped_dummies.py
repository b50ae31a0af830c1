"""What ONNX Runtime is given for a dummy: nothing, unless somebody could have written to it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from support.models.tiny_model_runs import bound_prompt, prompt

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.onnxruntime.bound_session import SkippedDummies
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine, "onnxruntime") as running:
        yield running


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """The shape of what ONNX Runtime has for each input that it was given."""
    shapes: Shapes = {}
    bind = onnxruntime.IOBinding.bind_ortvalue_input
    clear = onnxruntime.IOBinding.clear_binding_inputs

    def noted(self: Any, name: str, value: Any) -> None:
        shapes[name] = tuple(value.shape())
        bind(self, name, value)

    def cleared(self: Any) -> None:
        shapes.clear()
        clear(self)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", noted)
    monkeypatch.setattr(onnxruntime.IOBinding, "clear_binding_inputs", cleared)
    return shapes


def run(engine: Engine, tensor_map: TensorMap) -> Array:
    logits: Array = engine.execute(tensor_map)["logits"].numpy().copy()
    return logits


def pair(engine: Engine) -> tuple[str, str]:
    """The inputs of the first site."""
    a, b = engine.manifest.binding_names.pair(engine.manifest.sites[0].path)
    return a, b


def own(tensor_map: TensorMap, names: tuple[str, ...], value: float) -> dict[str, Array]:
    """Replace dummies by arrays of the caller's own; return these."""
    arrays = {name: np.full(tensor_map[name].shape, value, np.float32) for name in names}
    tensor_map.update({name: tensor_from_numpy(array) for name, array in arrays.items()})
    return arrays


def test_a_dummy_is_rank_1_and_onnx_runtime_gets_none(engine: Engine, bound: Shapes) -> None:
    tensor_map, sites = bound_prompt(engine), engine.manifest.lora_bindings
    run(engine, tensor_map)
    assert all(tensor_map[name].shape == site.shape(f, 1) for name, (site, f) in sites.items())
    assert set(bound) == set(engine.input_names) - set(sites)


def test_a_graph_without_defaults_is_given_dummies(engine: Engine) -> None:
    tensor_map, sites = bound_prompt(engine), engine.manifest.lora_bindings
    skipped = SkippedDummies(engine.manifest, ())
    assert not any(skipped.skips(name, tensor_map) for name in sites)
    assert all(SkippedDummies(engine.manifest, sites).skips(name, tensor_map) for name in sites)


def test_it_answers_as_with_zeros_of_rank_1(engine: Engine, bound: Shapes) -> None:
    skipped, tensor_map = run(engine, bound_prompt(engine)), bound_prompt(engine)
    own(tensor_map, tuple(engine.manifest.lora_bindings), 0.0)
    assert np.array_equal(run(engine, tensor_map), skipped)
    assert set(bound) == set(engine.input_names)


def test_zeros_of_the_caller_may_be_written_to(engine: Engine) -> None:
    tensor_map = bound_prompt(engine)
    arrays = own(tensor_map, pair(engine), 0.0)
    before = run(engine, tensor_map)
    for array in arrays.values():
        array[:] = 0.3
    after = run(engine, tensor_map)
    fresh = bound_prompt(engine)
    own(fresh, pair(engine), 0.3)
    assert np.abs(after - before).max() > 1e-3
    assert np.array_equal(after, run(engine, fresh))


def test_a_dummy_whose_partner_is_none_is_bound_as_it_is(engine: Engine, bound: Shapes) -> None:
    (a, b), tensor_map = pair(engine), bound_prompt(engine)
    expected = run(engine, tensor_map)
    dummy = tensor_map[b]
    own(tensor_map, (b,), 0.3)
    assert np.array_equal(run(engine, tensor_map), expected)  # A is zero
    assert bound[a] == tensor_map[a].shape
    tensor_map[b] = dummy
    run(engine, tensor_map)
    assert not {a, b} & set(bound)


def test_a_factor_of_another_rank_than_its_partner_is_refused(engine: Engine) -> None:
    (_, b), tensor_map = pair(engine), bound_prompt(engine)
    run(engine, tensor_map)
    rows = np.zeros((2, tensor_map[b].shape[1]), np.float32)
    tensor_map[b] = tensor_from_numpy(rows)
    with pytest.raises(TensorError, match="ONNX Runtime refuses these inputs"):
        engine.execute(tensor_map)


def test_an_adapter_and_the_base_model_in_turns(engine: Engine, tiny_engine: TinyEngine) -> None:
    manager, answers = LoRAManager(), list[Array]()
    manager.initialize_engine_bindings(engine)
    manager.load_weights("a", tiny_engine.adapter)
    tensor_map = prompt(engine)
    for is_active in (True, False, True, False):
        manager.switch_weights("a") if is_active else manager.reset_weights()
        manager.refresh_tensor_map(tensor_map)
        answers.append(run(engine, tensor_map))
    assert np.array_equal(answers[0], answers[2])
    assert np.array_equal(answers[1], answers[3])
    assert np.array_equal(answers[1], run(engine, bound_prompt(engine)))
    assert np.abs(answers[0] - answers[1]).max() > 1e-3


def test_an_input_that_is_renamed_between_runs_is_missed(engine: Engine) -> None:
    (a, _), tensor_map = pair(engine), bound_prompt(engine)
    run(engine, tensor_map)
    misnamed = {name if name != a else "lora_A_misnamed": t for name, t in tensor_map.items()}
    tensor_map.clear()
    tensor_map.update(misnamed)  # the same tensors in the same order
    with pytest.raises(TensorError, match=f"the tensor map lacks '?{a}"):
        engine.execute(tensor_map)


def test_a_map_without_anything_is_refused(engine: Engine) -> None:
    with pytest.raises(TensorError, match="the tensor map lacks"):
        engine.execute(TensorMap())
