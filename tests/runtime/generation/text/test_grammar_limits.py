"""Grammars without an end, hostile ones, and when they are compiled."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.eventually import eventually
from support.fakes.random_logits import STOP, RandomLogits, byte_tokenizer, params_of, tokens_of
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text import grammar_compiler
from trt_lora.runtime.generation.text.grammar_process import GrammarProcess
from trt_lora.runtime.generation.text.structured import Constraint, StructuredOutputsParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.serving.engine_loop import EngineLoop


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


class NothingAllowed:
    """A matcher that reports no error, has not stopped, and allows no token."""

    def deep_copy(self) -> "NothingAllowed":
        return self

    def get_error(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return False

    def consume_tokens(self, tokens: list[int]) -> None:
        del tokens

    def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None:
        del address, nbytes


def test_an_answer_that_no_token_can_follow_is_stuck_and_not_drawn_for_ever() -> None:
    matcher: Any = NothingAllowed()
    assert Constraint(matcher, 40, 0, [0]).error == "no token of this model is allowed next"


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputsParams(grammar="start: start"),
        StructuredOutputsParams(grammar="start: a\na: b\nb: a"),
        StructuredOutputsParams(json={"$ref": "#"}),
    ],
)
def test_what_no_token_begins_is_refused(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams
) -> None:
    with pytest.raises(ConfigError, match="refuses: no token of this model is allowed next"):
        tokens_of(tokenizer, params_of(structured_outputs=wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputsParams(grammar="start: /a+/ start"),
        StructuredOutputsParams(grammar='start: "a" start'),
        StructuredOutputsParams(regex="a{1000000000}"),
        StructuredOutputsParams(regex="(a{1000}){1000}"),
        StructuredOutputsParams(json={"type": "string", "minLength": 10**9}),
        StructuredOutputsParams(json={"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    ],
)
def test_what_has_no_end_ends_by_its_length(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams
) -> None:
    """Without `no_forcing`, what alone can follow would be written ahead for ever."""
    params = params_of(structured_outputs=wanted, max_tokens=30, logit_bias={STOP: 99.0})
    tokens = tokens_of(tokenizer, params)
    assert [token.finish_reason for token in tokens] == [None] * 29 + ["length"]


IN_MANY_WAYS = "start: e\ne: e e | e e e | e e e e | e e e e e | /[a-f]/"
IN_ONE = "start: /[a-f]+/"


def test_text_that_can_be_read_in_too_many_ways_is_an_error_of_its_answer_alone(
    tokenizer: TextTokenizer,
) -> None:
    """Each token of it would take more than the one before."""
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=3)
    params = params_of(max_tokens=200, logit_bias={STOP: -100})
    plain = batch.submit([3], params)
    wanted = [StructuredOutputsParams(grammar=grammar) for grammar in (IN_MANY_WAYS, IN_ONE)]
    many, few = (batch.submit([3], replace(params, structured_outputs=w)) for w in wanted)
    failed: dict[int, BaseException] = {}
    given: dict[int, int] = dict.fromkeys((plain, many, few), 0)
    while batch:
        answers = batch.step()
        failed |= answers.failed
        for number in answers.tokens:
            given[number] += 1
    assert failed.keys() == {many}
    assert re.search("cannot go on: .* items; max is 1000", str(failed[many]))
    assert 10 < given[many] < given[few] == given[plain] == 200


def test_steps_and_preemptions_compile_nothing(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = StructuredOutputsParams(regex="abcdef")
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=1)
    row = batch.submit([3], params_of(structured_outputs=wanted))
    monkeypatch.delattr(grammar_compiler, "compiled")
    monkeypatch.delattr(GrammarProcess, "failure")
    text = step_of(batch)[0].text
    batch.preempt(row)
    while batch:
        text += step_of(batch)[0].text
    assert text == "abcdef"


def test_a_step_that_did_not_end_is_forgotten_by_a_grammar_too(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = StructuredOutputsParams(regex="abcdef")
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=2)
    rows = [batch.submit([3], params_of(structured_outputs=wanted)) for _ in range(2)]
    texts = dict.fromkeys(rows, "")
    monkeypatch.delattr(grammar_compiler, "compiled")
    for at in range(20):
        if at == 3:  # the first of them has its token, and the step is lost
            with monkeypatch.context() as patch:
                patch.setattr(batch._active[rows[1]], "append", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    batch.step()
        for token in step_of(batch) if batch else ():
            texts[token.sequence_id] += token.text
    assert set(texts.values()) == {"abcdef"}


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_loop_has_read_the_tokenizer_before_it_runs(tokenizer: TextTokenizer) -> None:
    """It would hold all threads up for half a second."""
    scheduler = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=1)
    tokenizer._grammars = None
    with EngineLoop(scheduler, lambda _: None):
        assert tokenizer._grammars is not None
        known: object = tokenizer._grammars
        scheduler.requests([3], params_of(structured_outputs=StructuredOutputsParams(regex="a")))
        assert tokenizer._grammars is known


def test_answers_of_others_go_on_while_a_grammar_is_tried(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, ended = threading.Event(), set[int]()

    def failure(process: GrammarProcess, grammar: str) -> str:
        may_end.wait(60)
        return "it takes more than 5 s"

    monkeypatch.setattr(GrammarProcess, "failure", failure)
    scheduler = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=2)
    params = params_of(max_tokens=20, logit_bias={STOP: -100})
    with EngineLoop(scheduler, lambda answers: ended.update(ends_of(answers))) as loop:
        with ThreadPoolExecutor(1) as client:
            wanted = StructuredOutputsParams(regex="x")
            refused = client.submit(loop.submit, [3], replace(params, structured_outputs=wanted))
            (other,) = loop.submit([3], params)
            assert eventually(lambda: other in ended)
            assert not refused.done()
            may_end.set()
        with pytest.raises(ConfigError, match="refuses: it takes more than 5 s"):
            refused.result()
        (again,) = loop.submit([3], params)
        assert eventually(lambda: again in ended)


def ends_of(answers: StepAnswers) -> list[int]:
    return [number for number, token in answers.tokens.items() if token.finish_reason is not None]


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_a_grammar_of_more_than_64_kib_is_refused(kind: str) -> None:
    text = {"json": json.dumps({"enum": ["x" * 70_000]}), "regex": "é" * 33_000}.get(
        kind, "//" + "x" * 70_000
    )
    with pytest.raises(ConfigError, match=rf"has a {kind} of \d+ bytes, expected 65536 at most"):
        StructuredOutputsParams(**{kind: text})


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_a_schema_that_is_nested_too_deeply_is_refused(
    tokenizer: TextTokenizer, depth: int
) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(ConfigError, match=r"json .*(recursion|no JSON)"):
        tokens_of(tokenizer, params_of(structured_outputs=StructuredOutputsParams(json=text)))


def test_half_a_character_in_a_grammar_is_named() -> None:
    for kind, text in (("regex", "\udc80"), ("json", '{"pattern": "\\ud800"}')):
        with pytest.raises(ConfigError, match=f"the {kind} of structured_outputs has .* surrogate"):
            StructuredOutputsParams(**{kind: text})
