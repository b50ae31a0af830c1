"""Log probabilities of prompts: of each token, chunk by chunk, whatever shares the batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.slot_engine import POISON, SlotEngine, _logits, expected_answer, number_file
from support.fakes.tiny_engine import expected_logits
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import ConfigError, OutputError
from trt_lora.runtime.generation.decoding import rows as decoding_rows
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import PromptLogprobs, Token
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.store import AdapterStore

ASKED = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
PLAIN = replace(ASKED, prompt_logprobs=None)
PROMPT = [4, 5, 6, 7, 8, 9, 10, 11, 12]


class CountingEngine(SlotEngine):
    """Notes how many rows of logits each run leaves, and how many tokens it runs."""

    def __init__(self) -> None:
        super().__init__(slots=3)
        self.kept, self.tokens = list[int](), 0

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.kept.append(tensor_map["kept"].shape[0])
        self.tokens += tensor_map["input_ids"].numpy().size
        return super().execute(tensor_map)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def batch(engine: CountingEngine, tmp_path: Path) -> Scheduler:
    adapters = AdapterStore(engine)
    for number in (1, 2, POISON):
        adapters.load(str(number), number_file(tmp_path, number))
    return scheduler_of(engine, adapters)


def check(known: PromptLogprobs | None, prompt: list[int], number: int, count: int = 2) -> None:
    """Compare with the log softmax of the fake's own logits, in `longdouble`."""
    assert known is not None
    assert len(known) == len(prompt)
    assert known[0] is None
    for place, found in enumerate(known[1:], 1):
        exact = _logits(sum(prompt[:place]), place, number).astype(np.longdouble)
        exact -= np.log(np.exp(exact).sum())
        order = np.argsort(-exact, kind="stable").tolist()
        assert found is not None
        assert list(found) == list(dict.fromkeys([prompt[place], *order[:count]]))
        for token, one in found.items():
            assert one.rank == order.index(token) + 1
            assert one.logprob == pytest.approx(float(exact[token]), abs=1e-6)


def run(batch: Scheduler) -> dict[int, list[Token]]:
    """Run a batch dry; return the tokens of each request."""
    given: dict[int, list[Token]] = {}
    while batch:
        for token in step_of(batch):
            given.setdefault(token.sequence_id, []).append(token)
        batch.check_integrity()
    return given


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 64])
def test_each_token_of_a_prompt_has_that_of_the_tokens_before_it(
    batch: Scheduler, engine: CountingEngine, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(decoding_rows, "_MOST_KEPT", chunk)
    asked = batch.submit(PROMPT, ASKED, adapter="1")
    beside = batch.submit([9, 3], PLAIN, adapter="2")
    given = run(batch)
    check(given[asked][0].prompt_logprobs, PROMPT, 1)
    assert [token.token_id for token in given[asked]] == expected_answer(PROMPT, 1, PLAIN)
    assert [token.token_id for token in given[beside]] == expected_answer([9, 3], 2, PLAIN)
    assert max(engine.kept) <= max(chunk, 2)  # two rows are decoded
    others = *given[asked][1:], *given[beside]
    assert all(token.prompt_logprobs is None for token in others)


@pytest.mark.parametrize("count", [0, 1, -1])
def test_as_many_as_are_asked_for_come_beside_the_tokens_own(batch: Scheduler, count: int) -> None:
    asked = batch.submit(PROMPT, replace(ASKED, prompt_logprobs=count))
    check(run(batch)[asked][0].prompt_logprobs, PROMPT, 0, 97 if count < 0 else count)


def test_a_prompt_of_one_token_has_none(batch: Scheduler) -> None:
    asked = batch.submit([7], ASKED)
    assert run(batch)[asked][0].prompt_logprobs == (None,)


def test_a_prompt_whose_rows_are_kept_is_run_anew_and_serves_others(
    batch: Scheduler, engine: CountingEngine
) -> None:
    batch.submit(PROMPT, PLAIN, adapter="1")
    run(batch)
    before = engine.tokens
    asked = batch.submit(PROMPT, ASKED, adapter="1")
    check(run(batch)[asked][0].prompt_logprobs, PROMPT, 1)
    assert engine.tokens - before >= len(PROMPT)
    before = batch.shared_tokens
    batch.submit(PROMPT, PLAIN, adapter="1")
    run(batch)
    assert batch.shared_tokens - before == len(PROMPT) - 1


def test_equal_prompts_that_come_together_are_run_for_each_that_asks(batch: Scheduler) -> None:
    requests = [batch.submit(PROMPT, params) for params in (PLAIN, ASKED, ASKED, PLAIN)]
    given = run(batch)
    for request in requests[1:3]:
        check(given[request][0].prompt_logprobs, PROMPT, 0)
    assert given[requests[0]][0].prompt_logprobs is given[requests[3]][0].prompt_logprobs is None


def test_answers_to_one_prompt_share_them(batch: Scheduler, engine: CountingEngine) -> None:
    drawn = replace(ASKED, n=3, temperature=1.0, seed=3)
    requests = batch.submit_all(PROMPT, drawn, adapter="2")
    given = run(batch)
    for request in requests:
        check(given[request][0].prompt_logprobs, PROMPT, 2)
    alone = run_tokens(batch, replace(drawn, n=1), "2")
    assert [token.token_id for token in given[requests[0]]] == alone


def run_tokens(batch: Scheduler, params: SamplingParams, adapter: str) -> list[int | None]:
    request = batch.submit(PROMPT, params, adapter=adapter)
    return [token.token_id for token in run(batch)[request]]


def test_the_first_of_several_answers_may_leave_before_they_are_known(
    batch: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_rows, "_MOST_KEPT", 4)
    first, second, third = batch.submit_all(PROMPT, replace(ASKED, n=3, temperature=1.0, seed=3))
    step_of(batch)
    batch.cancel(first)
    given = run(batch)
    for request in (second, third):
        check(given[request][0].prompt_logprobs, PROMPT, 0)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_request_that_is_preempted_has_them_once(
    batch: Scheduler, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(decoding_rows, "_MOST_KEPT", 4)
    asked, given = batch.submit(PROMPT, ASKED), list[Token]()
    for _ in range(steps):
        given += step_of(batch)
    batch.preempt(asked)
    given += run(batch)[asked]
    check(given[0].prompt_logprobs, PROMPT, 0)
    assert all(token.prompt_logprobs is None for token in given[1:])
    assert [token.token_id for token in given] == expected_answer(PROMPT, 0, PLAIN)


def test_a_stop_token_that_comes_first_brings_them(batch: Scheduler) -> None:
    first = expected_answer(PROMPT, 0, PLAIN)[0]
    assert first is not None
    asked = batch.submit(PROMPT, replace(ASKED, stop_token_ids=[first]))
    (token,) = run(batch)[asked]
    assert token.token_id is None
    check(token.prompt_logprobs, PROMPT, 0)


def test_a_prompt_without_numbers_is_an_error_of_its_request_alone(batch: Scheduler) -> None:
    bad = batch.submit(PROMPT, ASKED, adapter=str(POISON))
    good = batch.submit(PROMPT, ASKED, adapter="1")
    given, failed = list[Token](), dict[int, BaseException]()
    while batch:
        answers = batch.step()
        given += answers.tokens.values()
        failed |= answers.failed
    assert isinstance(failed.pop(bad), OutputError)
    assert not failed
    assert {token.sequence_id for token in given} == {good}
    check(given[0].prompt_logprobs, PROMPT, 1)


@pytest.mark.parametrize("value", [-2, 1.5, True, "2"])
def test_a_number_without_a_meaning_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"prompt_logprobs is .*, expected "):
        SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("hurrying")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_on_a_gpu_they_are_those_of_logits_on_the_host(
    static_engine: object, cuda: FakeCuda, temperature: float
) -> None:
    prompt = [5, 9, 2, 6, 5, 3, 5]
    params = SamplingParams(
        max_tokens=3, temperature=temperature, seed=1, ignore_eos=True, prompt_logprobs=3
    )
    with static_engine() as engine:  # type: ignore[operator]
        batch = scheduler_of(engine, rows=2)
        asked = batch.submit(prompt, params)
        batch.submit([1], replace(params, prompt_logprobs=None))
        given = run(batch)
        del batch
    known = given[asked][0].prompt_logprobs
    assert known is not None
    assert known[0] is None
    exact: Array = expected_logits(np.array(prompt), {}).astype(np.longdouble)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for place, found in enumerate(known[1:]):
        assert found is not None
        order = np.argsort(-exact[place], kind="stable")[:3].tolist()
        assert set(found) == {prompt[place + 1], *order}
        for token, one in found.items():
            assert one.logprob == pytest.approx(float(exact[place, token]), abs=1e-4)
