"""Decode steps on a GPU: what each asks of CUDA and TensorRT, and what adapters change."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import DOWN, UP, engine_directory, expected_logits, small_manifest
from support.models.tiny_model_runs import (
    FIRST,
    SECOND,
    adapter,
    bindings_of,
    expected_answer,
    manager_of,
)
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime import SamplingParams, TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation.decoding.decode_steps import Group, RowInput
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

MakeEngine = Callable[..., TensorRTEngine]
BEGIN = [  # a step that a graph answers
    "cudaGetDevice",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaMemcpyAsync",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
]
AHEAD = [*BEGIN, "cudaEventRecord", "cudaEventSynchronize"]  # of the next step, then of this one
SWITCHED = [AHEAD[0], "cudaStreamSynchronize", *AHEAD[1:]]  # behind what another run has begun
FETCH = ["cudaGetDevice", "cudaMemcpyAsync", "cudaStreamSynchronize"]  # the logits of a row


def tokens(count: int) -> SamplingParams:
    """Greedy, so many tokens, whatever they are."""
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)


@contextmanager
def decoder_of(
    engine: TensorRTEngine, prompts: Sequence[Sequence[int]], rows: int
) -> Iterator[StaticDecoder]:
    """Run prompts of a cache of so many rows."""
    with engine:
        decoder = StaticDecoder(engine, bindings_of(manager_of(engine)), rows)
        for row, prompt in enumerate(prompts):
            decoder.cache.admit(row)
            decoder.run(np.array([prompt]), first=row)
        yield decoder
        del decoder


def close(logits: Array, ids: Sequence[int], weights: dict[str, Array] | None = None) -> bool:
    """Whether logits [vocab] are those of the last token."""
    expected = expected_logits(np.array(ids), weights or {})[-1]
    return np.allclose(logits, expected, rtol=1e-4, atol=1e-4)


# Calls of a step.


def test_an_answer_of_512_tokens_is_one_capture_and_one_launch_for_every_other_token(
    static_engine: MakeEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    answer: list[int | None] = []
    calls: list[list[str]] = []
    callbacks: list[int] = []  # how many plugin calls there were before each step
    called: list[None] = []
    trt.call_plugin = lambda: called.append(None)
    with static_engine(max_len=520) as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit([3, 1, 4], tokens(512))
        for _ in range(512):
            before = len(cuda.calls)
            callbacks.append(len(called) + len(trt.bound))
            answer += [token.token_id for token in step_of(batch)]
            calls.append(cuda.names()[before:])

    # The prompt, the first decode step with the second behind it, and what all others do.
    assert ["cudaStreamBeginCapture" in step for step in calls[:2]] == [False, True]
    assert calls[1].count("cudaGraphLaunch") == 1
    assert calls[2:-1] == [AHEAD] * 509
    assert calls[-1] == ["cudaEventSynchronize"]
    assert set(callbacks[2:]) == {len(called) + len(trt.bound)}  # no plugin, no address
    assert answer == expected_answer([3, 1, 4], 512)


def test_a_step_copies_tokens_and_lengths_in_and_a_row_of_logits_out_where_it_is_asked_for(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with decoder_of(static_engine(), [[3, 1], [4]], rows=2) as decoder:
        for row in (0, 1, 0):
            told = {at: RowInput(at, token) for at, token in enumerate((1, 5))}
            before = len(cuda.copies)
            (found,) = decoder.steps.run([Group(told, decoder.adapter)])
            upload, download = cuda.copies[before:]
            assert upload.nbytes <= 4 * 256  # ids, lengths, places and temperatures, each aligned
            assert upload.source_is_pinned
            assert download.nbytes < 2 * 2 * 1024 + 3 * 256  # 256 tokens of each row, their logits
            before = len(cuda.copies)
            assert [logits.shape for logits in found.topk.logits([row])] == [(11,)]
            assert [copy.nbytes for copy in cuda.copies[before:]] == [11 * 4]


def test_the_default_streams_work_is_waited_for(static_engine: MakeEngine, cuda: FakeCuda) -> None:
    with decoder_of(static_engine(), [[3, 1]], rows=1) as decoder:
        for _ in range(3):
            decoder.decode(np.array([1]))
        wait = max(at for at, name in enumerate(cuda.names()) if name == BEGIN[2])
        assert cuda.calls[wait - 1][0] == BEGIN[1]
        assert cuda.calls[wait - 1][1][1] == 0
        assert cuda.calls[wait][1][0] != 0


# Numbers of rows.


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_any_rows_are_in_one_of_few_spans(static_engine: MakeEngine, rows: int) -> None:
    engine = static_engine()
    engine.manifest = replace(engine.manifest, max_batch_size=8)
    with decoder_of(engine, [[1]], rows) as decoder:
        found = set()
        for first in range(rows):
            for count in range(1, rows - first + 1):
                span = decoder.steps._runs.span(first, count, 1)
                assert span.first <= first < first + count <= span.end <= rows
                assert span.kept == span.rows
                found.add(span)
    assert len(found) < 2 * rows


@pytest.mark.parametrize(("rows", "expected"), [(4, [1, 2, 4, 4]), (3, [1, 2, 3])])
def test_a_step_runs_a_power_of_two_of_rows_or_all(
    static_engine: MakeEngine, cuda: FakeCuda, rows: int, expected: list[int]
) -> None:
    prompts = [[3, 1, 4], [1], [5, 9], [2, 6, 5]][:rows]
    with decoder_of(static_engine(), prompts, rows) as decoder:
        spans = [decoder.steps._runs.span(0, count, count) for count in range(1, rows + 1)]
        assert [span.rows for span in spans] == expected
        written = [list(prompt) for prompt in prompts]
        for count in (*range(1, rows + 1), *range(rows, 0, -1)):
            logits = decoder.decode(np.arange(count) + 2)
            for row in range(count):
                written[row].append(row + 2)
                assert close(logits[row], written[row])
    captures = cuda.names().count("cudaStreamBeginCapture")
    assert captures == len(set(expected))  # one for each number of rows


def test_rows_that_are_not_asked_for_stay_as_they_were(static_engine: MakeEngine) -> None:
    prompts = [[3, 1, 4], [1], [5, 9], [2, 6, 5]]
    with decoder_of(static_engine(), prompts, rows=4) as decoder:
        first = decoder.decode(np.array([7, 0, 8]), rows=np.array([0, 2])).copy()
        second = decoder.decode(np.array([1, 2, 3, 4])).copy()
        assert decoder.cache.lengths.tolist() == [5, 2, 4, 4]

    assert close(first[0], [3, 1, 4, 7])
    assert close(first[1], [5, 9, 8])
    rows = ([3, 1, 4, 7, 1], [1, 2], [5, 9, 8, 3], [2, 6, 5, 4])
    assert all(close(logits, ids) for logits, ids in zip(second, rows, strict=True))


def test_a_row_in_the_padding_that_has_no_room_is_refused_before_it_is_overrun(
    static_engine: MakeEngine,
) -> None:
    with decoder_of(static_engine(), [[3], [1], [2], [1] * 8], rows=4) as decoder:
        for _ in range(8):
            decoder.run(np.array([[5]]), first=3)
        decoder.decode(np.array([1, 2]))
        with pytest.raises(TensorError, match="17 tokens are more than this engine's 16"):
            decoder.decode(np.array([1, 2, 3]))
        assert decoder.cache.lengths.tolist() == [2, 2, 1, 16]


# Adapters.


def test_a_switch_between_tokens_binds_what_changed_and_keeps_one_graph_for_each_adapter(
    static_engine: MakeEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    only_down = adapter(3, DOWN)  # beside SECOND, whose other site is a dummy too
    with static_engine() as engine:
        manager = manager_of(engine, a=SECOND, b=only_down)
        decoder = StaticDecoder(engine, bindings_of(manager), 1)
        decoder.cache.admit(0)
        decoder.run(np.array([[3, 1]]))
        ids, seen = [3, 1], []
        for step, name in enumerate(["a", "b", "", "a", "b", "", "b", "a"]):
            decoder.use_adapter(bindings_of(manager, name))
            trt.bound.clear()
            before = len(cuda.calls)
            logits = decoder.decode(np.array([step]))[0]
            ids.append(step)
            assert close(logits, ids, {"a": SECOND, "b": only_down, "": {}}[name])
            seen.append((cuda.names()[before:] == [*SWITCHED, *FETCH], set(trt.bound)))
        del decoder

    assert [is_launch for is_launch, _ in seen] == [False] * 3 + [True] * 5
    assert all(not bound for is_launch, bound in seen if is_launch)
    assert cuda.names().count("cudaStreamBeginCapture") == 3


def test_without_graphs_a_switch_sets_the_addresses_of_the_adapter_alone(
    static_engine: MakeEngine, trt: FakeTensorRT
) -> None:
    with static_engine(max_graphs=0) as engine:
        manager = manager_of(engine, a=FIRST, b=SECOND)
        decoder = StaticDecoder(engine, bindings_of(manager, "a"), 1)
        decoder.cache.admit(0)
        decoder.decode(np.array([3]))
        decoder.decode(np.array([1]))
        trt.bound.clear()
        decoder.decode(np.array([4]))
        assert not trt.bound
        decoder.use_adapter(bindings_of(manager, "b"))
        decoder.decode(np.array([1]))
        assert set(trt.bound) == {f"lora_{f}_{site.path}" for site in (UP, DOWN) for f in "AB"}
        del decoder


def test_more_adapters_than_graphs_are_not_captured_at_every_token(
    static_engine: MakeEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    weights = {
        f"{rank}{factor}": {name: factor * array for name, array in adapter(rank, UP, DOWN).items()}
        for rank in (1, 2, 3)
        for factor in (1, 2)
    }
    with static_engine(max_graphs=2) as engine:
        manager = manager_of(engine, **weights)
        decoder = StaticDecoder(engine, bindings_of(manager), 1)
        decoder.cache.admit(0)
        ids: list[int] = []
        for step, name in enumerate(2 * [*weights]):
            decoder.use_adapter(bindings_of(manager, name))
            ids.append(step % 11)
            assert close(decoder.decode(np.array([step % 11]))[0], ids, weights[name])
        assert len(list(trt.contexts)) == 3  # its own, and one of each graph
        del decoder

    assert cuda.names().count("cudaStreamBeginCapture") == 2
    assert cuda.names().count("cudaGraphLaunch") == 2


def test_an_adapter_on_the_host_is_refused_and_the_one_before_goes_on(
    static_engine: MakeEngine,
) -> None:
    with static_engine() as engine:
        manager = manager_of(engine, a=FIRST)
        decoder = StaticDecoder(engine, bindings_of(manager, "a"), 1)
        decoder.cache.admit(0)
        decoder.decode(np.array([3]))
        host = TensorMap({name: tensor_from_numpy(array) for name, array in FIRST.items()})
        decoder.use_adapter(host)
        with pytest.raises(TensorError, match="lies on the host; a prepared run takes"):
            decoder.decode(np.array([1]))
        decoder.use_adapter(bindings_of(manager, "a"))
        assert close(decoder.decode(np.array([4]))[0], [3, 4], FIRST)
        del decoder


# Failures.


def test_a_step_that_fails_lengthens_no_row_and_drops_the_graphs(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with decoder_of(static_engine(), [[3, 1]], rows=1) as decoder:
        for token in (4, 1):
            decoder.decode(np.array([token]))
        cuda.fail("cudaGraphLaunch", Status.cudaErrorInvalidValue)
        with pytest.raises(BackendError, match="invalid argument"):
            decoder.decode(np.array([5]))
        assert decoder.cache.lengths.tolist() == [4]
        assert not [g for g in cuda.graphs if g.launchable and not g.destroyed]
        assert close(decoder.decode(np.array([5]))[0], [3, 1, 4, 1, 5])


def test_a_prepared_run_does_not_outlive_its_engine(static_engine: MakeEngine) -> None:
    engine = static_engine()
    with engine:
        decoder = StaticDecoder(engine, bindings_of(manager_of(engine)), 1)
        decoder.cache.admit(0)
        decoder.decode(np.array([3]))
    with pytest.raises(StateError, match="the engine is closed"):
        decoder.decode(np.array([1]))
    with engine, pytest.raises(StateError, match="closed since this run was prepared"):
        decoder.decode(np.array([1]))


def session(engine: TensorRTEngine) -> None:
    """Two rows, the first of which goes on alone."""
    with engine:
        batch = scheduler_of(engine, rows=2)
        for prompt, count in (([3, 1, 4], 6), ([1, 5], 4)):
            batch.submit(prompt, tokens(count))
        written: dict[int, list[int]] = {0: [], 1: []}
        while batch:
            for token in step_of(batch):
                assert token.token_id is not None
                written[token.sequence_id].append(token.token_id)
        assert written == {0: expected_answer([3, 1, 4], 6), 1: expected_answer([1, 5], 4)}


def test_whichever_call_fails_nothing_is_left_and_no_token_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = succeeded = index = 0
    done = False
    while not done:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        trt = FakeTensorRT(cuda)
        trt.install(monkeypatch)
        trt.manifest = small_manifest()
        cuda.fail_call(index)
        try:
            session(TensorRTEngine(engine_directory(tmp_path, trt.manifest), trt.manifest))
            succeeded += 1
        except BackendError:
            failed += 1
        done = index >= len(cuda.calls)
        name = cuda.names()[min(index, len(cuda.calls) - 1)]
        if "Free" not in name and "Destroy" not in name:  # what could not be freed is still there
            cuda.check()
            assert not list(trt.contexts)
        index += 1

    assert failed > 40
    assert succeeded > 5  # without a graph, or with what could not be freed


def test_batches_take_turns_on_one_engine_each_with_an_adapter_of_its_own(
    static_engine: MakeEngine,
) -> None:
    weights = {"a": FIRST, "b": SECOND, "": {}}
    with static_engine() as engine:
        batches = {}
        for name in weights:
            store = manager_of(engine, a=FIRST, b=SECOND).store
            batches[name] = scheduler_of(engine, store, rows=1)
            batches[name].submit([3, 1, 4], tokens(9), adapter=name or None)
        answers: dict[str, list[int | None]] = {name: [] for name in weights}
        for _ in range(9):
            for name in batches:
                answers[name] += [token.token_id for token in step_of(batches[name])]
        batches.clear()

    for name, answer in answers.items():
        assert answer == expected_answer([3, 1, 4], 9, weights[name])


def test_what_cannot_be_prepared_is_refused(static_engine: MakeEngine) -> None:
    engine, how = static_engine(), {"logits": "logits", "fed": "input_ids"}
    with pytest.raises(StateError, match="the engine is closed"):
        engine.prepare_topk(TensorMap(), **how)
    with engine, pytest.raises(TensorError, match="the tensor map lacks input_ids, lengths"):
        engine.prepare_topk(TensorMap(), **how)
