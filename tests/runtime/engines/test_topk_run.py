"""Runs that ONNX Runtime is prepared for: as `execute`, with what is bound left alone."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from support.models.tiny_model_runs import bindings_of, manager_of
from support.models.tiny_sizes import VOCABULARY

from trt_lora.plugins.errors import StateError, TensorError
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.onnxruntime.engine import OnnxRuntimeEngine
from trt_lora.runtime.engines.onnxruntime.session_pool import OnnxRuntimeTopKRun
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import token_inputs
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

SOON, HELD = 60, 0.2  # seconds: all has happened; what is not held back would have happened
BOUND, ROWS, STEPS = 16, 2, 5


@pytest.fixture
def engine(tiny_engine: TinyEngine) -> Iterator[OnnxRuntimeEngine]:
    with open_executor(tiny_engine.engine, "onnxruntime") as running:
        assert isinstance(running, OnnxRuntimeEngine)
        yield running


@dataclass(frozen=True)
class Case:
    """An engine, LoRA bindings of an adapter and of none, and tokens [steps, rows]."""

    engine: OnnxRuntimeEngine
    adapters: dict[str, TensorMap]
    cache: KVCache
    tokens: Array

    def prepare(self, name: str = "a") -> OnnxRuntimeTopKRun:
        """Prepare a step with an adapter."""
        return prepared(self.engine, step(self.cache, self.adapters[name], self.tokens[0], 0))

    def expected(self, name: str, tokens: Array) -> Array:
        """Logits [steps, rows, vocab] of tokens [steps, rows], a step at a time."""
        engine, lora = self.engine, self.adapters[name]
        cache = KVCache(engine.manifest, engine.memory, ROWS)
        steps = [engine.execute(step(cache, lora, now, done)) for done, now in enumerate(tokens)]
        return np.stack([outputs["logits"].numpy() for outputs in steps])


@pytest.fixture
def case(engine: OnnxRuntimeEngine, tiny_engine: TinyEngine) -> Case:
    manager = manager_of(engine)
    manager.load_weights("a", tiny_engine.adapter)
    adapters = {name: bindings_of(manager, name) for name in ("", "a")}
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (STEPS, ROWS))
    return Case(engine, adapters, KVCache(engine.manifest, engine.memory, ROWS), tokens)


def prepared(engine: OnnxRuntimeEngine, tensor_map: TensorMap) -> OnnxRuntimeTopKRun:
    return engine.prepare_topk(tensor_map, logits="logits", fed="input_ids")


def step(cache: KVCache, lora: TensorMap, tokens: Array, done: int) -> TensorMap:
    """Everything that a step of all rows reads."""
    lengths, kept = np.full(ROWS, done, np.int64), np.arange(ROWS)
    inputs = token_inputs(tokens[:, None].copy(), lengths, kept, BOUND)
    tensors = {name: tensor_from_numpy(array) for name, array in inputs.items()}
    return TensorMap({**lora, **tensors, **cache.views(0, ROWS)})


def run_again(run: OnnxRuntimeTopKRun, tokens: Array, done: int) -> Array:
    """Run the step of these tokens; return its logits, where they are."""
    run.inputs["input_ids"][:, 0] = tokens
    run.inputs["lengths"][:] = done
    run.enqueue()
    first = run.result().logits(range(ROWS))[0]
    logits = first.base
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", ["", "a"], ids=["base model", "adapter"])
def test_it_answers_as_execute_and_leaves_its_outputs_where_they_are(case: Case, name: str) -> None:
    run = case.prepare(name)
    found = [run_again(run, now, done) for done, now in enumerate(case.tokens)]
    assert len({logits.ctypes.data for logits in found}) == 1
    last = case.expected(name, case.tokens)[-1]
    for logits in found:  # all are the last one's memory
        np.testing.assert_array_equal(logits, last)


def test_nothing_is_bound_between_two_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.prepare()
    run_again(run, case.tokens[0], 0)
    with monkeypatch.context() as patch:
        for name in ("bind_ortvalue_input", "bind_ortvalue_output", "bind_output"):
            patch.delattr(onnxruntime.IOBinding, name)
        found = run_again(run, case.tokens[1], 1)
    np.testing.assert_array_equal(found, case.expected("a", case.tokens[:2])[1])


def test_runs_that_are_executed_meanwhile_change_nothing(case: Case) -> None:
    run = case.prepare()
    base = case.expected("", case.tokens)
    for done, now in enumerate(case.tokens):
        found = run_again(run, now, done).copy()
        np.testing.assert_array_equal(found, case.expected("a", case.tokens)[done])
        np.testing.assert_array_equal(case.expected("", case.tokens), base)
        assert not np.allclose(found, base[done], atol=1e-3)


def test_it_takes_an_adapter_gives_it_up_and_takes_it_again(case: Case) -> None:
    run = case.prepare("")
    first = {name: case.expected(name, case.tokens[:1])[0] for name in ("", "a")}
    for name in ("", "a", "", "a"):
        run.bind(case.adapters[name])
        np.testing.assert_array_equal(run_again(run, case.tokens[0], 0), first[name])


def test_what_is_written_goes_to_the_array_that_was_bound_last(case: Case) -> None:
    run = case.prepare()
    ids = np.zeros((ROWS, 1), np.int64)
    run.bind(TensorMap({"input_ids": tensor_from_numpy(ids)}))
    found = run_again(run, case.tokens[0], 0)
    assert ids[:, 0].tolist() == case.tokens[0].tolist()
    np.testing.assert_array_equal(found, case.expected("a", case.tokens[:1])[0])


def test_a_tensor_that_is_refused_leaves_the_one_before(case: Case) -> None:
    run = case.prepare()
    before = run_again(run, case.tokens[0], 0).copy()
    paths = [site.path for site in case.engine.manifest.sites]
    value = next(path for path in paths if path.endswith("v_proj"))  # of one token q does nothing
    a, b = case.engine.manifest.binding_names.pair(value)
    half = tensor_from_numpy(np.zeros(case.adapters["a"][b].shape, np.float16))
    other = tensor_from_numpy(np.full(case.adapters["a"][a].shape, 9, np.float32))
    with pytest.raises(TensorError, match=f"{b} is float16 on cpu; this engine takes float32"):
        run.bind(TensorMap({a: other, b: half}))
    np.testing.assert_array_equal(run_again(run, case.tokens[0], 0), before)


@pytest.mark.parametrize("spoil", ["token", "size of an output"])
def test_after_a_run_that_failed_it_goes_on(case: Case, spoil: str) -> None:
    run = case.prepare()
    before = run_again(run, case.tokens[0], 0).copy()
    kept = TensorMap({"kept": tensor_from_numpy(np.arange(ROWS))})
    if spoil == "token":
        wrong = np.array([VOCABULARY, 3])
    else:
        wrong = case.tokens[0]
        run.bind(TensorMap({"kept": tensor_from_numpy(np.zeros(1, np.int64))}))
    with pytest.raises(TensorError, match="ONNX Runtime refuses these inputs"):
        run_again(run, wrong, 0)
    run.bind(kept)
    np.testing.assert_array_equal(run_again(run, case.tokens[0], 0), before)


def test_a_run_on_the_host_is_made_when_it_is_enqueued_and_its_result_is_taken_once(
    case: Case,
) -> None:
    run = case.prepare()
    with pytest.raises(StateError, match="no run is under way; enqueue one"):
        run.result()
    with pytest.raises(StateError, match="runs on the host do not overlap"):
        run.enqueue(is_fed=True)
    run.enqueue()
    run.discard()
    with pytest.raises(StateError, match="no run is under way"):
        run.result()


def test_an_input_that_is_missing_is_refused_by_name(case: Case) -> None:
    tensor_map = step(case.cache, case.adapters[""], case.tokens[0], 0)
    del tensor_map["lengths"]
    with pytest.raises(TensorError, match="the tensor map lacks lengths"):
        prepared(case.engine, tensor_map)


def test_it_does_not_outlive_its_engine_nor_keep_its_weights(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_map = step(case.cache, case.adapters["a"], case.tokens[0], 0)
    sessions: list[weakref.ref[Any]] = []
    with OnnxRuntimeEngine(case.engine.directory, case.engine.manifest) as other:
        original = onnxruntime.IOBinding.__init__

        def noted(self: Any, session: Any) -> None:
            sessions.append(weakref.ref(session))
            original(self, session)

        monkeypatch.setattr(onnxruntime.IOBinding, "__init__", noted)
        run = prepared(other, tensor_map)
        run_again(run, case.tokens[0], 0)
    gc.collect()
    assert sessions
    assert all(session() is None for session in sessions)
    for call in (
        run.enqueue,
        lambda: run.bind(case.adapters[""]),
        lambda: prepared(other, tensor_map),
    ):
        with pytest.raises(StateError, match="closed; use: with open_engine"):
            call()
    with other, pytest.raises(StateError, match="closed"):  # open again, with another session
        run.enqueue()


def test_closing_waits_for_the_run_under_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = onnxruntime.InferenceSession.run_with_iobinding

    def held(session: Any, binding: Any) -> None:
        begun.set()
        go_on.wait(SOON)
        original(session, binding)

    run = case.prepare()
    right = case.expected("a", case.tokens[:1])[0]
    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", held)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(run_again, run, case.tokens[0], 0)
        assert begun.wait(SOON)
        leaving = pool.submit(case.engine.__exit__, None, None, None)
        time.sleep(HELD)
        assert not leaving.done()
        go_on.set()
        np.testing.assert_array_equal(answer.result(SOON), right)
        leaving.result(SOON)
