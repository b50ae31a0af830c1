"""A decode step of several groups, each with the bindings of an adapter and rows of its own."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.tiny_engine import EMBEDDING, expected_logits
from support.models.tiny_model_runs import FIRST, SECOND, bindings_of, manager_of
from support.models.tiny_sizes import VOCABULARY

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation.decoding.decode_steps import Group, RowInput
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_runs import StepRuns
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import ZeroMemory

MakeEngine = Callable[..., TensorRTEngine]
WEIGHTS: Mapping[str, Mapping[str, Array]] = {"a": FIRST, "b": SECOND, "": {}}
PROMPTS = [[3, 1, 4], [1], [5, 9], [2, 6, 5]]


@dataclass
class Served:
    """Rows of a cache, each with an adapter, and the tokens that they were given."""

    decoder: StaticDecoder
    maps: Mapping[str, TensorMap]
    adapters: Sequence[str]  # of each row
    written: list[list[int]]

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """Give some rows a token, in a group for each adapter; return logits [vocab] of each."""
        groups = []
        for name, adapter in self.maps.items():
            mine = {row: t for row, t in tokens.items() if self.adapters[row] == name}
            if mine:
                groups.append(Group({row: RowInput(row, t) for row, t in mine.items()}, adapter))
        found: dict[int, Array] = {}
        for output in self.decoder.steps.run(groups):
            logits = output.topk.logits(range(len(output.sequences)))
            found |= zip(output.sequences, (row.copy() for row in logits), strict=True)
        for row, token in tokens.items():
            self.written[row].append(token)
        return found


# On a GPU.


@pytest.fixture
def served(static_engine: MakeEngine, cuda: FakeCuda) -> Iterator[Served]:
    """Four rows whose adapters alternate."""
    with static_engine() as engine:
        manager = manager_of(engine, a=FIRST, b=SECOND)
        maps = {name: bindings_of(manager, name) for name in WEIGHTS}
        decoder = StaticDecoder(engine, maps["a"], 4)
        for row, (prompt, name) in enumerate(zip(PROMPTS, "abab", strict=True)):
            decoder.cache.admit(row)
            decoder.use_adapter(maps[name])
            decoder.run(np.array([prompt]), first=row)
        served = Served(decoder, maps, list("abab"), [list(prompt) for prompt in PROMPTS])
        yield served
        vars(served).clear()  # the cache and the adapters go before the engine
        del decoder, maps, manager


def check_rows(served: Served, found: Mapping[int, Array]) -> None:
    """Logits of each row are those of its tokens and adapter, and its cache holds these tokens."""
    for row, logits in found.items():
        ids = np.array(served.written[row])
        expected = expected_logits(ids, dict(WEIGHTS[served.adapters[row]]))[-1]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    cache = served.decoder.cache
    assert cache.lengths.tolist() == [len(ids) for ids in served.written]
    for row, written in enumerate(served.written):
        held = EMBEDDING[written] + 0.1 * np.arange(len(written))[:, None]
        for view in cache.views(row, 1).values():
            np.testing.assert_allclose(view.numpy()[0, 0, : len(written)], held, rtol=1e-5)


@pytest.mark.usefixtures("hurrying")
def test_groups_whose_rows_lie_between_each_others_answer_as_if_alone(served: Served) -> None:
    for step in range(6):
        found = served.step({row: (3 * row + step) % 11 for row in range(4)})
        assert sorted(found) == [0, 1, 2, 3]
        check_rows(served, found)


@pytest.mark.usefixtures("hurrying")
def test_rows_that_no_group_has_stay_as_they_were(served: Served) -> None:
    for rows in ([0, 3], [1, 2], [2], [0, 1, 3], [3, 0, 2]):
        found = served.step({row: row + 5 for row in rows})
        assert sorted(found) == sorted(rows)
        check_rows(served, found)


def test_each_group_has_a_run_and_a_graph_of_its_own_step_after_step(
    served: Served, cuda: FakeCuda
) -> None:
    tokens = {row: row for row in range(4)}
    for _ in range(2):
        served.step(tokens)
    before = len(cuda.calls)
    for _ in range(3):
        served.step(tokens)
    names = cuda.names()[before:]
    assert names.count("cudaGraphLaunch") == 3 * 2
    assert "cudaStreamBeginCapture" not in names
    assert not [name for name in names if "Malloc" in name]


def test_a_single_adapter_after_several_takes_a_run_that_is_there(
    served: Served, cuda: FakeCuda
) -> None:
    for _ in range(2):
        served.step({row: row for row in range(4)})
    served.adapters = [""] * 4
    allocated = cuda.names().count("cudaMallocHost")
    logits = served.step({row: row for row in range(4)})
    assert sorted(logits) == [0, 1, 2, 3]
    assert cuda.names().count("cudaMallocHost") == allocated


@pytest.mark.parametrize("at", [0, 1])
def test_where_a_group_fails_no_row_is_longer_and_the_step_can_be_made_again(
    served: Served, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    tokens = {row: row for row in range(4)}
    served.step(tokens)
    before, taken = served.decoder.cache.lengths.tolist(), list[object]()
    take = StepRuns.take

    def fail_behind(self: StepRuns, *args: Any) -> Any:
        if len(taken) == at:
            cuda.fail("cudaMemcpyAsync", Status.cudaErrorInvalidValue)
        taken.append(args)
        return take(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StepRuns, "take", fail_behind)
        with pytest.raises(BackendError):
            served.step(tokens)
    assert served.decoder.cache.lengths.tolist() == before
    check_rows(served, served.step(tokens))


def test_a_step_ahead_is_forgotten_where_groups_are_asked_for(served: Served) -> None:
    steps, adapter = served.decoder.steps, served.maps["a"]
    (found,) = steps.run([Group({0: RowInput(0, 7)}, adapter)], ahead=True)
    served.written[0].append(7)
    assert steps._next is not None
    token = int(found.topk.first()[0])
    check_rows(served, served.step({0: token, 1: 4}))
    assert steps._next is None


def test_a_step_ahead_with_another_adapter_is_not_used(served: Served) -> None:
    steps = served.decoder.steps
    (found,) = steps.run([Group({0: RowInput(0, 7)}, served.maps["a"])], ahead=True)
    served.written[0].append(7)
    token = int(found.topk.first()[0])
    (found,) = steps.run([Group({0: RowInput(0, token)}, served.maps["b"])])
    (logits,) = found.topk.logits([0])
    expected = expected_logits(np.array([*served.written[0], token]), SECOND)[-1]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


# On the host.


@pytest.fixture
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine, "onnxruntime") as running:
        yield running


@pytest.fixture
def manager(engine: Engine, tiny_engine: TinyEngine) -> LoRAManager:
    found = manager_of(engine)
    found.load_weights("a", tiny_engine.adapter)
    return found


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inputs that were bound, each time that one is."""
    found: list[str] = []
    original = onnxruntime.IOBinding.bind_ortvalue_input

    def noted(self: Any, name: str, value: Any) -> None:
        found.append(name)
        original(self, name, value)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", noted)
    return found


def host_rows(engine: Engine, manager: LoRAManager) -> Served:
    """Two rows, one with an adapter and one without."""
    maps = {name: bindings_of(manager, name) for name in ("a", "")}
    decoder = StaticDecoder(engine, maps["a"], 2)
    return Served(decoder, maps, ["a", ""], [[], []])


def test_two_adapters_in_turns_on_one_engine_bind_nothing_anew(
    engine: Engine, manager: LoRAManager, bound: list[str]
) -> None:
    served, ids = host_rows(engine, manager), np.random.default_rng(0).integers(3, VOCABULARY, 9)
    expected = {}
    for name, adapter in served.maps.items():
        decoder = StaticDecoder(engine, adapter, 1)
        expected[name] = decoder.run(ids[None], kept=np.arange(9))
    for step, token in enumerate(ids.tolist()):
        bound.clear()
        found = served.step({0: token, 1: token})
        np.testing.assert_allclose(found[0], expected["a"][step], atol=1e-5)
        np.testing.assert_allclose(found[1], expected[""][step], atol=1e-5)
        assert ("input_ids" in bound) == (step == 0)
        assert not bound or step == 0
    assert not np.allclose(expected["a"], expected[""], atol=1e-3)
    assert served.decoder.cache.lengths.tolist() == [9, 9]


def test_a_run_begins_at_the_first_row_that_is_asked_for(
    engine: Engine, manager: LoRAManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = onnxruntime.IOBinding.bind_ortvalue_input

    def noted(self: Any, name: str, value: Any) -> None:
        if name == "input_ids":
            shapes.append(tuple(value.shape()))
        original(self, name, value)

    served = host_rows(engine, manager)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", noted)
    whole = StaticDecoder(engine, served.maps[""], 1).run(np.array([[5, 7]]), kept=np.arange(2))
    shapes.clear()
    for at, token in enumerate((5, 7)):
        np.testing.assert_allclose(served.step({1: token})[1], whole[at], atol=1e-5)
    assert shapes == [(1, 1)]
    assert served.decoder.cache.lengths.tolist() == [0, 2]


def test_an_adapter_that_a_step_does_not_use_is_let_go_of(
    engine: Engine, manager: LoRAManager
) -> None:
    served = host_rows(engine, manager)
    served.step({0: 3, 1: 4})
    tensors = [t for t in served.maps["a"].values() if not isinstance(t.owner, ZeroMemory)]
    owners = [weakref.ref(tensor.owner) for tensor in tensors]
    del tensors
    served.maps = {"": served.maps[""]}
    served.decoder.use_adapter(served.maps[""])
    served.step({1: 5})
    manager.reset_weights()
    manager.unload("a")
    gc.collect()
    assert owners
    assert all(owner() is None for owner in owners)


def test_no_more_runs_are_kept_than_are_of_use(engine: Engine, manager: LoRAManager) -> None:
    served = host_rows(engine, manager)
    runs = served.decoder.steps._runs
    for tokens in ({0: 3}, {1: 3}, {0: 4, 1: 4}):
        served.step(tokens)
    assert [len(runs._made), len(runs._taken)] == [2, 0]
