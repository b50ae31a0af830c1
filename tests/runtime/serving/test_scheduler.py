"""Requests of many adapters get the answers that each would get alone."""

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.deferred_executor import DeferredExecutor
from support.eventually import eventually
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file
from support.schedulers import scheduler_of
from tokenizers import Tokenizer, decoders, models

from trt_lora.plugins.errors import (
    AdapterError,
    ConfigError,
    OutputError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.store.source import FileSource
from trt_lora.runtime.store.store import AdapterStore

NUMBERS = {"a": 1, "b": 2, "c": 3, "bad": POISON}
LONG = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
DRAWN = SamplingParams(max_tokens=20, temperature=0.7, seed=5, ignore_eos=True)


class Served:
    """A scheduler of two slots and four rows, and all that it has given."""

    def __init__(self, folder: Path, slots: int = 2, **options: Any) -> None:
        self.engine = SlotEngine(slots)
        self.adapters = AdapterStore(self.engine)
        for name, number in NUMBERS.items():
            self.adapters.load(name, number_file(folder, number))
        self.background = DeferredExecutor()
        self.adapters._prefetcher._thread = self.background  # type: ignore[assignment]
        self.scheduler = scheduler_of(self.engine, self.adapters, max_wait_steps=4, **options)
        self.tokens: dict[int, list[int | None]] = {}
        self.failed: dict[int, BaseException] = {}

    def step(self, count: int = 1) -> Mapping[int, Token]:
        answers = StepAnswers({}, {})
        for _ in range(count):
            self.background.run()
            answers = self.scheduler.step()
            self.scheduler.check_integrity()
            self.failed |= answers.failed
            for number, token in answers.tokens.items():
                self.tokens.setdefault(number, []).append(token.token_id)
        return answers.tokens

    def finish(self) -> None:
        for _ in range(500):
            if not self.scheduler:
                break
            self.step()
        assert not self.scheduler
        assert not self.adapters._levels.leases


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_every_request_is_answered_as_alone_with_its_adapter(
    tmp_path: Path, chunk: int | None
) -> None:
    served = Served(tmp_path, **({"max_num_batched_tokens": chunk} if chunk else {}))
    given = {}
    for turn, name in enumerate(["a", "b", None, "c", "a", None, "c", "b", "a", "c"]):
        prompt = list(range(turn + 1, 2 * turn + 3))
        sampling = LONG if turn % 3 else DRAWN
        given[served.scheduler.submit(prompt, sampling, adapter=name)] = (prompt, name, sampling)
        served.step(turn % 4)
    served.finish()
    assert not served.failed
    for request, (prompt, name, sampling) in given.items():
        number = NUMBERS.get(name or "", 0)
        assert served.tokens[request] == expected_answer(prompt, number, sampling)


@pytest.mark.parametrize("sampling", [LONG, DRAWN], ids=["greedy", "drawn"])
def test_a_preempted_request_goes_on_where_it_was(served: Served, sampling: SamplingParams) -> None:
    request = served.scheduler.submit([4, 5], sampling, adapter="b")
    for count in (1, 3, 0, 4, 2):
        served.step(count + 2)
        served.scheduler.preempt(request)
        served.scheduler.check_integrity()
    served.finish()
    assert served.tokens[request] == expected_answer([4, 5], 2, sampling)


def test_a_preempted_request_of_a_replaced_adapter_fails(served: Served, tmp_path: Path) -> None:
    request = served.scheduler.submit([4, 5], LONG, adapter="b")
    other = served.scheduler.submit([4, 5], LONG, adapter="a")
    served.step(4)
    served.scheduler.preempt(request)
    served.adapters.load("b", number_file(tmp_path, 7), replace=True)
    served.finish()
    assert isinstance(served.failed.pop(request), StateError)
    assert not served.failed
    assert served.tokens[other] == expected_answer([4, 5], 1, LONG)


def test_a_replaced_adapter_answers_later_requests_alone(served: Served, tmp_path: Path) -> None:
    before = served.scheduler.submit([4], LONG, adapter="b")
    served.step(3)
    served.adapters.load("b", number_file(tmp_path, 7), replace=True)
    after = served.scheduler.submit([4], LONG, adapter="b")
    served.step(4)
    served.adapters.unload("b")
    served.finish()
    assert served.tokens[before] == expected_answer([4], 2, LONG)
    assert served.tokens[after] == expected_answer([4], 7, LONG)
    with pytest.raises(UnknownAdapterError):
        served.scheduler.submit([4], adapter="b")


def test_a_cancelled_request_frees_its_row_and_its_slot(served: Served) -> None:
    scheduler = served.scheduler
    running, waiting = (scheduler.submit([4], LONG, adapter=name) for name in ("a", "c"))
    scheduler.submit([4], LONG, adapter="b")
    served.step(3)
    scheduler.cancel(running)
    served.step(2)
    assert served.tokens[waiting]
    scheduler.cancel(waiting)
    with pytest.raises(StateError, match=f"request {waiting} neither waits nor runs"):
        scheduler.cancel(waiting)
    with pytest.raises(StateError, match=f"request {waiting} neither waits nor runs"):
        scheduler.tokens(waiting)
    with pytest.raises(StateError, match=f"request {waiting} has no row"):
        scheduler.preempt(waiting)
    served.finish()


def test_logits_that_are_no_numbers_end_their_request_alone(served: Served) -> None:
    good, bad, short = (
        served.scheduler.submit([4], sampling, adapter=name)
        for name, sampling in (
            ("a", LONG),
            ("bad", LONG),
            ("a", SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)),
        )
    )
    served.finish()
    assert isinstance(served.failed.pop(bad), OutputError)
    assert not served.failed
    assert served.tokens[good] == expected_answer([4], 1, LONG)
    assert len(served.tokens[short]) == 1


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(tmp_path: Path) -> None:
    served = Served(tmp_path)
    path = number_file(tmp_path, 9)
    served.adapters.register("broken", path)
    path.write_bytes(b"nothing")
    bad = served.scheduler.submit([4], LONG, adapter="broken")
    good = served.scheduler.submit([4], LONG, adapter="a")
    served.finish()
    assert isinstance(served.failed.pop(bad), AdapterError)
    assert not served.failed
    assert served.tokens[good] == expected_answer([4], 1, LONG)


def test_rows_go_on_while_an_adapter_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, may_read = Served(tmp_path), threading.Event()
    served.adapters._prefetcher._thread = None  # a thread
    served.adapters.register("slow", number_file(tmp_path, 9))
    read = FileSource.read
    monkeypatch.setattr(FileSource, "read", lambda *a: may_read.wait(60) and read(*a))
    with closing(served.adapters):
        slow = served.scheduler.submit([4], LONG, adapter="slow")
        base = served.scheduler.submit([4], LONG)
        for _ in range(25):
            served.step()
        assert served.tokens.keys() == {base}
        may_read.set()
        assert eventually(lambda: slow in served.step())
        served.finish()
    assert served.tokens[slow] == expected_answer([4], 9, LONG)


def test_what_cannot_be_answered_is_refused_at_once(served: Served) -> None:
    with pytest.raises(UnknownAdapterError, match="unknown adapter 'x'; loaded: a, b, c"):
        served.scheduler.submit([4], adapter="x")
    with pytest.raises(ConfigError, match="the prompt is empty"):
        served.scheduler.submit([])
    with pytest.raises(ConfigError, match="the prompt has 33 tokens, this engine takes 32"):
        served.scheduler.submit([4] * 33)
    with pytest.raises(ConfigError, match="n is 2, and submit takes one request; call submit_all"):
        served.scheduler.submit([4], SamplingParams(max_tokens=64, temperature=1, n=2, seed=0))
    assert not served.scheduler


def test_a_preempted_request_ends_at_its_stop_string(tmp_path: Path) -> None:
    characters = Tokenizer(models.WordLevel({chr(200 + n): n for n in range(97)}, unk_token="È"))
    characters.decoder = decoders.Fuse()
    characters.save(str(tmp_path / "tokenizer.json"))
    served = Served(tmp_path, tokenizer=TextTokenizer(tmp_path))
    answer = expected_answer([4, 5], 2, LONG)
    stop = "".join(chr(200 + token) for token in answer[2:4] if token is not None)
    request = served.scheduler.submit([4, 5], replace(LONG, stop=stop), adapter="b")
    served.step(3)
    served.scheduler.preempt(request)
    served.finish()
    assert not served.failed
    assert served.tokens[request] == answer[:4]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop="a"), "there is no tokenizer; pass tokenizer="),
        (SamplingParams(bad_words=["a"]), "there is no tokenizer; pass tokenizer="),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            "there is no tokenizer; pass tokenizer=",
        ),
        (SamplingParams(stop_token_ids=[97]), "stop_token_ids holds token id 97, expected 0 to 96"),
        (SamplingParams(logit_bias={97: 1}), "logit_bias holds token id 97, expected 0 to 96"),
        (SamplingParams(allowed_token_ids=[3, 97]), "allowed_token_ids holds token id 97"),
    ],
)
def test_what_a_request_can_never_have_is_refused_when_it_is_submitted(
    served: Served, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        served.scheduler.submit([4], params, adapter="a")
    assert not served.scheduler


def test_base_rows_run_beside_as_many_adapters_as_slots(served: Served) -> None:
    names = ["a", "b", None, None]
    requests = [served.scheduler.submit([4], LONG, adapter=name) for name in names]
    served.step(3)
    assert served.tokens.keys() == set(requests)
