"""Structured output: whatever the logits are, a finished answer is what was asked for."""

import builtins
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eventually import eventually
from support.fakes.fake_engine import FakeExecutor, make_manifest
from support.schedulers import scheduler_of
from support.steps import step_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.plugins.errors import BackendError, ConfigError, OutputError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text import grammar_compiler
from trt_lora.runtime.generation.text.grammar_process import GrammarProcess
from trt_lora.runtime.generation.text.structured import Constraint, StructuredOutputsParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy
from trt_lora.runtime.serving.engine_loop import EngineLoop

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
STOP, VOCABULARY = len(BYTES) + 2, 300  # the vocabulary has tokens that the tokenizer has not
LONGEST = 1000


class RandomLogits(FakeExecutor):
    """Answers with logits that say nothing; `}`, `]` and quotes are likely, so that answers end."""

    def __init__(self, seed: int) -> None:
        manifest = make_manifest()
        fields = {**vars(manifest), "max_seq_len": LONGEST + 8}
        fields["outputs"] = tuple(
            type(o)(o.name, o.dtype, ("kept", VOCABULARY) if o.name == "logits" else o.shape)
            for o in manifest.outputs
        )
        fields["inputs"] = tuple(
            type(b)(b.name, b.dtype, tuple(LONGEST + 8 if n == 32 else n for n in b.shape))
            for b in manifest.inputs
        )
        super().__init__(type(manifest)(**fields))
        self._random = np.random.default_rng(seed)

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        shape = (tensor_map["kept"].numpy().size, VOCABULARY)
        logits = self._random.normal(0, 3, shape).astype(np.float32)
        logits[:, [BYTES.index(char) for char in '}]"0,']] += 8
        logits[:, STOP] += 9
        return {"logits": tensor_from_numpy(logits)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A token for every byte, two longer ones, and one that ends the answer."""
    folder = tmp_path_factory.mktemp("bytes")
    tokens = {token: number for number, token in enumerate([*BYTES, '":', "00"])}
    made = Tokenizer(models.BPE(tokens, [('"', ":"), ("0", "0")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    assert made.token_to_id("<end>") == STOP
    return TextTokenizer(folder)


def params_of(**fields: Any) -> SamplingParams:
    """Greedy, as long as the engine has room, and ended by `STOP` alone."""
    given = {
        "max_tokens": LONGEST,
        "temperature": 0.0,
        "stop_token_ids": [STOP],
        "ignore_eos": True,
        "seed": 0,
        **fields,
    }
    return SamplingParams(**given)


def tokens_of(tokenizer: TextTokenizer, params: SamplingParams, seed: int = 0) -> list[Token]:
    batch = scheduler_of(RandomLogits(seed), tokenizer=tokenizer, rows=1)
    batch.submit([3, 4], params)
    tokens: list[Token] = []
    while batch:
        tokens += step_of(batch)
    return tokens


def answer_of(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams, seed: int, **fields: Any
) -> tuple[str, list[Token]]:
    """The text of an answer, which has ended by itself, and its tokens."""
    params = params_of(structured_outputs=wanted, **{"temperature": 1.0, **fields})
    tokens = tokens_of(tokenizer, params, seed)
    assert tokens[-1].finish_reason == "stop"
    return "".join(token.text for token in tokens), tokens


Check = Callable[[Any], bool]


def schemas() -> st.SearchStrategy[tuple[dict[str, Any], Check]]:
    """JSON schemas, and whether a value is one of theirs, said in Python."""
    leaves = st.sampled_from(
        [
            ({"type": "boolean"}, lambda v: isinstance(v, bool)),
            ({"type": "null"}, lambda v: v is None),
            ({"type": "integer", "maximum": 50}, lambda v: type(v) is int and v <= 50),
            ({"type": "string", "maxLength": 6}, lambda v: isinstance(v, str) and len(v) <= 6),
            ({"enum": ["a", 3, "ü"]}, lambda v: v in ("a", 3, "ü")),
        ]
    )
    return st.recursive(leaves, lambda inner: arrays(inner) | objects(inner), max_leaves=4)


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner.map(
        lambda item: (
            {"type": "array", "items": item[0], "maxItems": 3},
            lambda v: isinstance(v, list) and len(v) <= 3 and all(map(item[1], v)),
        )
    )


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(["x", "name", "é"]), inner, min_size=1, max_size=2)
    return fields.map(
        lambda items: (
            {
                "type": "object",
                "properties": {name: schema for name, (schema, _) in items.items()},
                "required": [*items],
                "additionalProperties": False,
            },
            lambda v: v.keys() == items.keys() and all(items[k][1](v[k]) for k in v),
        )
    )


@settings(max_examples=40, deadline=None)
@given(schemas(), st.integers(0, 9999), st.booleans())
def test_an_answer_is_what_its_schema_says(
    tokenizer: TextTokenizer, schema: tuple[dict[str, Any], Check], seed: int, as_text: bool
) -> None:
    fields, is_one = schema
    wanted = StructuredOutputsParams(json=json.dumps(fields) if as_text else fields)
    text, _ = answer_of(tokenizer, wanted, seed)
    assert is_one(json.loads(text)), text


@pytest.mark.parametrize("regex", ["[a-f]{2,9}", "(yes|no)", "[0-9]+(\\.[0-9]{2})?", "é*x"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_answer_matches_its_regex(
    tokenizer: TextTokenizer, regex: str, temperature: float
) -> None:
    for seed in range(5):
        wanted = StructuredOutputsParams(regex=regex)
        text, _ = answer_of(tokenizer, wanted, seed, temperature=temperature)
        assert re.fullmatch(regex, text)


def test_an_answer_is_of_its_grammar_whatever_bias_and_penalties_say(
    tokenizer: TextTokenizer,
) -> None:
    wanted = StructuredOutputsParams(grammar='start: pair+\npair: "<" pair* ">"')
    bias = {BYTES.index("q"): 100.0, BYTES.index(">"): 6.0}
    for seed in range(5):
        text, _ = answer_of(tokenizer, wanted, seed, logit_bias=bias, frequency_penalty=-0.5)
        assert set(text) == {"<", ">"}
        while "<>" in text:
            text = text.replace("<>", "")
        assert text == ""


def test_an_answer_ends_where_nothing_can_follow(tokenizer: TextTokenizer) -> None:
    text, tokens = answer_of(tokenizer, StructuredOutputsParams(regex="ab"), 0)
    assert text == "ab"
    assert [token.finish_reason for token in tokens] == [None, "stop"]
    assert tokens[-1].token_id == BYTES.index("b")


def test_one_that_cannot_go_on_ends_alone_and_is_named(
    tokenizer: TextTokenizer,
) -> None:
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=2)
    other = batch.submit([3], params_of(max_tokens=20, logit_bias={STOP: -100}))
    wanted = StructuredOutputsParams(regex="[ab]{9}")
    row = batch.submit([3], params_of(max_tokens=20, structured_outputs=wanted))
    step_of(batch)
    constraint = batch._active[row].constraint
    assert constraint is not None
    constraint.accept([BYTES.index("z")])  # what no mask would allow
    answers = batch.step()
    assert isinstance(answers.failed[row], OutputError)
    assert f"structured output of prompt {row} cannot go on" in str(answers.failed[row])
    assert answers.tokens.keys() == {other}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (StructuredOutputsParams(regex="("), r"a regex that llguidance refuses: .*unclosed"),
        (StructuredOutputsParams(grammar='start: "a" b'), 'a grammar that .*unknown name: "b"'),
        (StructuredOutputsParams(json={"type": "foo"}), "a json that .*Invalid type: foo"),
        (StructuredOutputsParams(json={"not": {}}), r'a json that .*Unimplemented keys: \["not"\]'),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)structured_outputs has {message}"):
        answer_of(tokenizer, wanted, 0)


@pytest.mark.parametrize(
    "value", [{"a": {1, 2}}, {"a": float("nan")}, "{", '{"a": NaN}', "[" * 5000, '{}], "x": [{}']
)
def test_a_schema_that_is_no_json_is_refused(value: str | dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs has json .*, which is no JSON"):
        StructuredOutputsParams(json=value)


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
        answer_of(tokenizer, wanted, 0)


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
    assert re.search("cannot go on: .* items; max is", str(failed[many]))
    assert 10 < given[many] < given[few] == given[plain] == 200


def test_a_stop_string_ends_what_has_to_be_json(tokenizer: TextTokenizer) -> None:
    wanted = StructuredOutputsParams(regex='"ab+c*"')
    params = params_of(structured_outputs=wanted, stop=["bc"], logit_bias={BYTES.index("c"): 50.0})
    tokens = tokens_of(tokenizer, params)
    assert "".join(token.text for token in tokens) == '"a'
    assert (tokens[-1].finish_reason, tokens[-1].stop_reason) == ("stop", "bc")


@pytest.mark.parametrize(("ignores", "own"), [(False, []), (True, [STOP]), (False, [STOP])])
def test_an_answer_ends_with_a_stop_token_where_its_grammar_does_and_nowhere_else(
    tokenizer: TextTokenizer, ignores: bool, own: list[int]
) -> None:
    """The model's own is 2; all of them are far likelier than any text."""
    wanted = StructuredOutputsParams(regex="(ab)+")
    params = params_of(
        structured_outputs=wanted,
        ignore_eos=ignores,
        stop_token_ids=own,
        min_tokens=3,
        logit_bias={2: 199.0, STOP: 98.0},
    )
    tokens = tokens_of(tokenizer, params)
    assert "".join(token.text for token in tokens) == "abab"  # the least of more than 3
    assert (tokens[-1].token_id, tokens[-1].finish_reason) == (None, "stop")
    assert tokens[-1].stop_reason == (STOP if ignores else None)


def test_n_answers_follow_their_grammar_each(tokenizer: TextTokenizer) -> None:
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=4)
    wanted = StructuredOutputsParams(regex="[a-f]{9}")
    numbers = batch.submit_all([3], params_of(structured_outputs=wanted, n=4, temperature=9.0))
    texts = dict.fromkeys(numbers, "")
    while batch:
        for token in step_of(batch):
            texts[token.row] += token.text
    assert len(set(texts.values())) == 4
    assert all(re.fullmatch("[a-f]{9}", text) for text in texts.values())


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


def test_half_a_character_in_a_grammar_is_named() -> None:
    for kind, text in (("regex", "\udc80"), ("json", '{"pattern": "\\ud800"}')):
        with pytest.raises(ConfigError, match=f"the {kind} of structured_outputs has .* surrogate"):
            StructuredOutputsParams(**{kind: text})


def test_an_answer_without_an_end_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="needs a token that ends an answer, and there is none"):
        answer_of(tokenizer, StructuredOutputsParams(regex="a"), 0, stop_token_ids=())


def test_without_llguidance_the_extra_is_named(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llguidance":
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(tokenizer, "_grammars", None)
    with pytest.raises(BackendError, match=r"structured output needs .*trt-lora\[structured\]"):
        answer_of(tokenizer, StructuredOutputsParams(regex="a"), 0)
