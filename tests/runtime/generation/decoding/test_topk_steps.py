"""Steps whose candidates are found on the device, and steps begun ahead: on a fake GPU."""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.fakes.executed_run import ExecutedRun
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import CopyKind, Status, Work
from support.fakes.tiny_engine import VOCABULARY
from support.models.static_batches import (
    PROMPTS,
    answers_of,
    drain,
    greedy,
    is_ahead,
    keep,
    rows_of,
)
from support.models.tiny_model_runs import expected_answer
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.kernels import candidates
from trt_lora.runtime import SamplingParams, TensorMap
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.tensorrt import mirrored_block
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.generation import sampling as host_sampling
from trt_lora.runtime.generation.decoding import rows as decoding_rows
from trt_lora.runtime.generation.decoding.step_runs import StepRuns
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.generation.token import Logprobs, Token

pytestmark = pytest.mark.usefixtures("hurrying")

MakeEngine = Callable[..., TensorRTEngine]
MIXTURE = [
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=0),
    SamplingParams(max_tokens=8, temperature=1.5, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=5, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=2.0, top_p=0.8, seed=2, ignore_eos=True),
]
CHANGED = [
    SamplingParams(max_tokens=9, repetition_penalty=1.8, ignore_eos=True, temperature=0),
    SamplingParams(max_tokens=8, temperature=1.5, presence_penalty=1.5, seed=3, ignore_eos=True),
    SamplingParams(
        max_tokens=9, temperature=0.7, logit_bias={4: 3, 7: -9}, top_k=5, ignore_eos=True, seed=0
    ),
    SamplingParams(
        max_tokens=7, temperature=2.0, min_p=0.3, frequency_penalty=1, ignore_eos=True, seed=0
    ),
]


@contextmanager
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let batches take logits to the host, as with ONNX Runtime."""

    def run_of(engine: TensorRTEngine, inputs: TensorMap, *, logits: str, fed: str) -> ExecutedRun:
        return ExecutedRun(engine.execute, engine.manifest, inputs, logits)

    with monkeypatch.context() as patch:
        patch.setattr(TensorRTEngine, "topk", lambda _, logits, temperatures: HostTopK.of(logits))
        patch.setattr(TensorRTEngine, "prepare_topk", run_of)
        patch.setattr(StepRuns, "overlap", False)
        yield


def answers_with(
    engine: TensorRTEngine, sampling: abc.Sequence[SamplingParams], prompts: abc.Sequence[list[int]]
) -> dict[int, list[int]]:
    """Run a batch of prompts."""
    batch = scheduler_of(engine, rows=len(prompts))
    for prompt, params in zip(prompts, sampling, strict=True):
        batch.submit(prompt, params)
    return answers_of(batch)


# Tokens.


@pytest.mark.parametrize("max_graphs", [0, 32])
@pytest.mark.parametrize(
    "sampling",
    [*([params] * 4 for params in MIXTURE), MIXTURE, CHANGED],
    ids=["greedy", "temperature", "top-k", "top-p", "mixture", "changed"],
)
def test_tokens_are_those_of_logits_on_the_host(
    static_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    max_graphs: int,
    sampling: list[SamplingParams],
) -> None:
    with static_engine(max_graphs=max_graphs) as engine:
        found = answers_with(engine, sampling, PROMPTS)
        with on_the_host(monkeypatch):
            assert answers_with(engine, sampling, PROMPTS) == found


@pytest.mark.parametrize("params", MIXTURE[1:])
def test_where_two_candidates_do_not_decide_the_logits_of_the_row_do(
    static_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    cuda: FakeCuda,
    params: SamplingParams,
) -> None:
    monkeypatch.setattr(candidates, "KEPT", 2)
    monkeypatch.setattr(host_sampling, "_INITIAL_TOPK", 2)
    sampling = [greedy(7), params, params, greedy(7)]
    with static_engine() as engine:
        cuda.copies.clear()
        found = answers_with(engine, sampling, PROMPTS)
        sizes = [c.nbytes for c in cuda.copies if c.kind is CopyKind.cudaMemcpyDeviceToHost]
        assert VOCABULARY * 4 in sizes  # the logits of one row
        assert 4 * VOCABULARY * 4 not in sizes
        with on_the_host(monkeypatch):
            assert answers_with(engine, sampling, PROMPTS) == found


def test_a_search_waits_for_the_temperatures_of_its_rows(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    enqueue = cuda.enqueue

    def at_once_on_the_default_stream(work: Work) -> None:
        enqueue(work)
        if work.stream <= 0:
            cuda.cudaStreamSynchronize(0)

    with static_engine() as engine:
        expected = answers_with(engine, MIXTURE, PROMPTS)
        monkeypatch.setattr(cuda, "enqueue", at_once_on_the_default_stream)
        assert answers_with(engine, MIXTURE, PROMPTS) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("count", [0, 3, -1])
def test_log_probabilities_are_those_of_logits_on_the_host(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, temperature: float, count: int
) -> None:
    params = SamplingParams(
        max_tokens=6, temperature=temperature, logprobs=count, ignore_eos=True, seed=0
    )
    with static_engine() as engine:
        found = logprobs_with(engine, params)
        with on_the_host(monkeypatch):
            expected = logprobs_with(engine, params)
    assert [list(known) for known in found] == [list(known) for known in expected]
    for known, exact in zip(found, expected, strict=True):
        for token, one in known.items():
            assert one.rank == exact[token].rank
            assert one.logprob == pytest.approx(exact[token].logprob, abs=1e-6)


def test_the_host_begins_with_as_many_candidates_as_a_gpu_finds() -> None:
    assert host_sampling._INITIAL_TOPK == candidates.KEPT


def logprobs_with(engine: TensorRTEngine, params: SamplingParams) -> list[Logprobs]:
    """Those of every step of two prompts."""
    batch, found = scheduler_of(engine, rows=2), list[Logprobs]()
    for prompt in PROMPTS[:2]:
        batch.submit(prompt, params)
    while batch:
        found += [token.logprobs for token in step_of(batch) if token.logprobs is not None]
    assert len(found) == 2 * (params.max_tokens or 0)
    return found


def test_answers_to_one_prompt_are_those_of_the_prompt_run_for_each(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=7, temperature=1.5, seed=3, n=3, ignore_eos=True)
    found = []
    for shares in (True, False):  # without: each row runs its prompt
        with static_engine() as engine, monkeypatch.context() as patch:
            if not shares:
                patch.setattr(decoding_rows.Rows, "_leader", lambda *_: None)
                patch.setattr(decoding_rows.Rows, "_longest_prefix", lambda *_: (None, 0))
            batch = scheduler_of(engine, rows=4)
            batch.submit(PROMPTS[1], greedy(9))
            step_of(batch)
            batch.submit_all(PROMPTS[0], params)
            found.append(answers_of(batch))
    assert found[0] == found[1]
    assert len({tuple(found[0][row]) for row in (1, 2, 3)}) == 3


def test_greedy_brings_no_logits_to_the_host(static_engine: MakeEngine, cuda: FakeCuda) -> None:
    with static_engine(max_len=64) as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(60))
        step_of(batch)
        cuda.copies.clear()
        answers_of(batch)

    sizes: dict[CopyKind, list[int]] = {kind: [] for kind in CopyKind}
    for copy in cuda.copies:
        sizes[copy.kind].append(copy.nbytes)
    assert sizes == {
        # Ids once; lengths, places and temperatures each time.
        CopyKind.cudaMemcpyHostToDevice: [4 * 256] + [3 * 256] * 58,
        # 256 tokens and their logits; totals and flags.
        CopyKind.cudaMemcpyDeviceToHost: [2 * 1024 + 2 * 256] * 59,
        CopyKind.cudaMemcpyDeviceToDevice: [],
    }


# One step ahead.


def test_the_next_step_is_launched_before_this_one_is_waited_for(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(9))
        step_of(batch)
        step_of(batch)
        before = len(cuda.calls)
        step_of(batch)
        names = cuda.names()[before:]
        assert names.index("cudaGraphLaunch") < names.index("cudaEventSynchronize")
        assert cuda.hurries or cuda.pending_works() > 0  # the step ahead is not waited for
        answers_of(batch)


def test_no_step_is_begun_behind_the_last_one_by_length(static_engine: MakeEngine) -> None:
    with static_engine() as engine:
        batch = scheduler_of(engine, rows=2)
        batch.submit(PROMPTS[0], greedy(4))
        batch.submit(PROMPTS[1], greedy(9))
        ahead = []
        while batch:
            step_of(batch)
            ahead.append(is_ahead(batch))
            rows_of(batch).cache.check_integrity()
    # Their prompts; up to the fourth token; the other one alone, up to its ninth.
    assert ahead == [False, True, True, False, True, True, True, True, False]


def test_no_step_is_begun_where_a_row_has_no_room_for_it(static_engine: MakeEngine) -> None:
    with static_engine(max_len=8) as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(100))
        assert answers_of(batch) == {0: expected_answer(PROMPTS[0], 5)}


def test_no_step_is_begun_beyond_the_end_of_the_cache(static_engine: MakeEngine) -> None:
    with static_engine(max_len=8) as engine:
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], greedy(100))
        step_of(batch)
        answer = expected_answer(PROMPTS[0], 5)
        ahead = []
        for token in answer:
            rows_of(batch).sequences[0].pending = [token]
            rows_of(batch).decode()
            ahead.append(is_ahead(batch))
        assert ahead == [True] * 4 + [False]


@pytest.mark.parametrize("sampling", [MIXTURE, CHANGED], ids=["mixture", "changed"])
def test_for_sequences_that_draw_the_next_step_is_launched_before_text_is_made(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, sampling: list[SamplingParams]
) -> None:
    seen: list[bool] = []  # whether a step was under way when a sequence took its token
    append = Sequence.append

    def noted(self: Sequence, token: int, logprobs: Logprobs | None) -> Token:
        seen.append(is_ahead(batch))
        return append(self, token, logprobs)

    with static_engine() as engine:
        batch = scheduler_of(engine, rows=2)
        for prompt, params in zip(PROMPTS[:2], sampling, strict=False):
            batch.submit(prompt, replace(params, max_tokens=6))
        step_of(batch)  # the prompts
        with monkeypatch.context() as patch:
            patch.setattr(Sequence, "append", noted)
            while batch:
                step_of(batch)
                rows_of(batch).cache.check_integrity()
    # The last step by length is followed by none.
    assert seen == 2 * 4 * [True] + 2 * [False]


def test_tokens_are_the_same_where_no_step_is_launched_ahead(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sampling in (MIXTURE, CHANGED):
        with static_engine() as engine:
            found = answers_with(engine, sampling, PROMPTS)
            with monkeypatch.context() as patch:
                patch.setattr(StepRuns, "overlap", False)
                assert answers_with(engine, sampling, PROMPTS) == found


def test_a_step_launched_with_drawn_tokens_is_used_and_never_made_twice(
    static_engine: MakeEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=3, ignore_eos=True)
    copies = []
    for overlap in (True, False):
        monkeypatch.setattr(StepRuns, "overlap", overlap)
        with static_engine() as engine:
            before = len(cuda.calls)
            answers_with(engine, [drawn, drawn], PROMPTS[:2])
            copies.append(cuda.names()[before:].count("cudaMemcpyAsync"))
    assert copies[0] == copies[1]


def test_a_drawn_stop_token_is_followed_by_no_step_of_its_row(static_engine: MakeEngine) -> None:
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=3, ignore_eos=True)
    with static_engine() as engine:
        answer = answers_with(engine, [drawn], PROMPTS[:1])[0]
        place = next(at for at in range(2, 9) if answer[at] not in answer[:at])
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], replace(drawn, stop_token_ids=[answer[place]]))
        ahead = []
        while batch:
            step_of(batch)
            ahead.append(is_ahead(batch))
    assert ahead == [False, *[True] * (place - 1), False]


def test_what_fails_when_it_is_launched_ahead_is_met_by_the_step_itself(
    static_engine: MakeEngine, cuda: FakeCuda
) -> None:
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=3, ignore_eos=True)
    with static_engine() as engine:
        expected = answers_with(engine, [drawn], PROMPTS[:1])
        batch = scheduler_of(engine, rows=1)
        batch.submit(PROMPTS[0], drawn)
        answers: dict[int, list[int]] = {}
        for _ in range(3):
            keep(step_of(batch), answers)
        cuda.fail("cudaMemcpyAsync", Status.cudaErrorInvalidValue)
        keep(step_of(batch), answers)  # its tokens were found before
        assert not is_ahead(batch)
        drain(batch, answers)
    assert answers == expected


def test_results_that_the_next_step_overwrites_would_be_seen(
    static_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    original = mirrored_block.MirroredBlock.__init__

    def with_one_output(self: mirrored_block.MirroredBlock, *args: Any, **how: Any) -> None:
        original(self, *args, **how)
        for mirror in self.mirrors[1:]:
            mirror.outputs = self.mirrors[0].outputs
            mirror.download = self.mirrors[0].download  # type: ignore[method-assign]

    monkeypatch.setattr(mirrored_block.MirroredBlock, "__init__", with_one_output)
    cuda.hurries = True
    with static_engine() as engine:
        assert answers_with(engine, [greedy(9)], PROMPTS[:1]) != {0: expected_answer(PROMPTS[0], 9)}
