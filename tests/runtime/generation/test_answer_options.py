"""What an answer may ask for: an engine that spells a text, and where and how its answer ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from support.fakes.fake_engine import FakeExecutor, make_manifest
from support.schedulers import scheduler_of
from support.steps import step_of
from tokenizers import Tokenizer, decoders, models

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.serving.generate import answer_all
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.store import AdapterStore

# A character for each token, and "$" for the one that ends the model's answers: by its manifest 2.
CHARACTERS = "_-$ abcdefghijklmnopqrstuvwxyz▁"
END = "</s>"


class Spelling(FakeExecutor):
    """Wants the next character of a text at every place, and else the first that it may have."""

    def __init__(self, text: str) -> None:
        manifest = make_manifest()
        logits, *caches = manifest.outputs
        logits = replace(logits, shape=("kept", len(CHARACTERS)))
        super().__init__(replace(manifest, outputs=(logits, *caches)))
        self._text, self.tokens = text, 0
        self.directory = Path("nowhere")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        ids, lengths, kept = (tensor_map[n].numpy() for n in ("input_ids", "lengths", "kept"))
        self.tokens += ids.size
        logits = np.empty((*ids.shape, len(CHARACTERS)), np.float32)
        logits[:] = -np.arange(len(CHARACTERS)) / 8
        for row, length in enumerate(lengths):
            for place in range(ids.shape[1]):
                at = int(length) + place
                logits[row, place, CHARACTERS.index(self._text[at % len(self._text)])] += 9
        return {"logits": tensor_from_numpy(logits.reshape(-1, len(CHARACTERS))[kept])}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A first space is stripped, as by Llama's."""
    folder = tmp_path_factory.mktemp("characters")
    names = {END if char == "$" else char: n for n, char in enumerate(CHARACTERS)}
    made = Tokenizer(models.BPE(names, []))
    made.add_special_tokens([END])
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def params_of(**fields: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 6, **fields}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in given:
            given[name] = [CHARACTERS.index(char) for char in given[name]]
    return SamplingParams(**given)


def answer_of(tokenizer: TextTokenizer, text: str, **fields: Any) -> tuple[str, list[Token]]:
    batch = scheduler_of(Spelling(text), tokenizer=tokenizer, rows=1)
    batch.submit([4], params_of(**fields))
    tokens: list[Token] = []
    while batch:
        tokens += step_of(batch)
    return "".join(token.text for token in tokens), tokens


@pytest.mark.parametrize(
    ("wanted", "fields", "text", "reason"),
    [
        ("ab$c", {}, "ab", None),
        ("ab$c", {"stop": ["$", "c"]}, "ab", None),
        # ---- min_tokens: none of what ends an answer does before
        ("ab$c$", {"min_tokens": 2}, "ab", None),
        ("ab$c$", {"min_tokens": 3}, "ab_c", None),
        ("abxcx", {"min_tokens": 3, "stop_token_ids": "x"}, "ab_c", "x"),
        ("ab$cx", {"min_tokens": 3, "stop_token_ids": "x", "ignore_eos": True}, "ab_c", "x"),
        ("ab$c$", {"min_tokens": 6}, "ab_c_a", "length"),
        ("abcabc", {"min_tokens": 2, "stop": "bc"}, "a", "bc"),
        ("abcabc", {"min_tokens": 3, "stop": "bc"}, "abca", "bc"),
        ("abcabc", {"min_tokens": 6, "stop": "bc"}, "abcabc", "length"),
        # ---- ignore_eos, and whether special tokens are shown
        ("ab$c", {"ignore_eos": True}, "abcab", "length"),
        ("ab$c", {"ignore_eos": True, "skip_special_tokens": False}, f"ab{END}cab", "length"),
        (
            "a$$b",
            {"ignore_eos": True, "skip_special_tokens": False},
            f"a{END}{END}ba{END}",
            "length",
        ),
        # ---- stop tokens, and which of them it was
        ("abcd", {"stop_token_ids": "dc"}, "ab", "c"),
        ("abcd", {"stop_token_ids": "dc", "include_stop_str_in_output": True}, "abc", "c"),
        ("ab$", {"include_stop_str_in_output": True}, "ab", None),
        (
            "ab$",
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            f"ab{END}",
            None,
        ),
        # ---- stop strings, and which of them it was
        ("abcdef", {"stop": ["x", "cde", "d"]}, "abc", "d"),
        ("abcdef", {"stop": "cd", "include_stop_str_in_output": True}, "abcd", "cd"),
        ("abab$c", {"stop": ["b$", "ba"]}, "a", "ba"),
        ("abcdef", {"stop": "cd", "detokenize": True, "stop_token_ids": "d"}, "abc", "d"),
        # ---- what is never said
        ("abcdef", {"bad_words": ["bc"]}, "ab_def", "length"),
        ("abcdef", {"bad_words": ["c", " d"]}, "ab__ef", "length"),
        ("abcabc", {"bad_words": ["cab"]}, "abca_c", "length"),
        ("a_bc_d", {"bad_words": ["_"]}, "a-bc-d", "length"),
        ("abcdef", {"allowed_token_ids": "ace"}, "aacaea", "length"),
        ("ab$", {"allowed_token_ids": "ab"}, "abaaba", "length"),
        ("abcdef", {"allowed_token_ids": "abc", "bad_words": ["a"]}, "bbcbbb", "length"),
    ],
)
def test_an_answer_ends_where_it_is_asked_to_and_says_why(
    tokenizer: TextTokenizer, wanted: str, fields: Any, text: str, reason: str | None
) -> None:
    given_out, tokens = answer_of(tokenizer, wanted, **fields)
    last = tokens[-1]
    is_token = reason is None or reason in fields.get("stop_token_ids", "")
    expected = CHARACTERS.index(reason) if reason and is_token else reason
    assert given_out == text
    if reason == "length":
        assert (len(tokens), last.finish_reason, last.stop_reason) == (6, "length", None)
    else:
        assert (last.finish_reason, last.stop_reason) == ("stop", expected)
        assert (last.token_id is None) == is_token


def test_without_text_an_answer_has_its_tokens(tokenizer: TextTokenizer) -> None:
    text, tokens = answer_of(tokenizer, "abcdef", detokenize=False)
    assert text == ""
    assert [CHARACTERS[token.token_id or 0] for token in tokens] == [*"abcdef"]


def test_the_first_piece_of_an_answer_has_the_space_of_its_place(tokenizer: TextTokenizer) -> None:
    assert answer_of(tokenizer, "▁ab")[0] == " ab ab"
    batch = scheduler_of(Spelling("▁ab"), tokenizer=tokenizer, rows=1)
    row = batch.submit([4], params_of(max_tokens=4))
    text = "".join(token.text for _ in range(2) for token in step_of(batch))
    batch.preempt(row)
    assert text + "".join(token.text for _ in range(2) for token in step_of(batch)) == " ab "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([" "], "bad_words has ' ', of which the tokenizer makes no token"),
        (["a", "<much>"], "bad_words holds token id 99, expected 0 to 30: the vocabulary"),
    ],
)
def test_a_bad_word_that_no_tokens_make_is_refused(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    encode = tokenizer.encode_text

    def encoded(text: str, **options: Any) -> list[int]:
        return [99] if "much" in text else encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode_text", encoded)
    with pytest.raises(ConfigError, match=message):
        answer_of(tokenizer, "abc", bad_words=words)


def test_what_ends_answers_goes_on_behind_an_interrupt_of_the_row(tokenizer: TextTokenizer) -> None:
    """The text of the first tokens is not counted again when a row is run anew."""
    params = params_of(min_tokens=3, stop="bc", include_stop_str_in_output=True)
    for steps in range(5):
        batch = scheduler_of(Spelling("abcabc"), tokenizer=tokenizer, rows=1)
        row = batch.submit([4], params)
        text = "".join(token.text for _ in range(steps) for token in step_of(batch))
        batch.preempt(row) if steps else None
        while batch:
            text += "".join(token.text for token in step_of(batch))
        assert text == "abcabc"


# --------------------------------------------------------------------------------------- n, seeds


def drawn(scheduler: Scheduler, **fields: Any) -> list[list[int | None]]:
    """The tokens of `n` answers that are drawn nearly evenly."""
    params = SamplingParams(**{"temperature": 9.0, "max_tokens": 8, "ignore_eos": True, **fields})
    found: dict[int, list[int | None]] = {n: [] for n in scheduler.submit_all([4, 5, 6], params)}
    while scheduler:
        for token in step_of(scheduler):
            found[token.sequence_id].append(token.token_id)
    return list(found.values())


@pytest.mark.parametrize("seed", [0, 5, -7, (1 << 64) - 1, -(1 << 63)])
def test_n_answers_are_those_of_seeds_that_follow_one_another(seed: int) -> None:
    """As vLLM's; the last seed of 64 bits is followed by the first."""
    scheduler = scheduler_of(Spelling("abc"))
    several = drawn(scheduler, seed=seed, n=4)
    alone = [drawn(scheduler, seed=(seed + index) % (1 << 64))[0] for index in range(4)]
    assert several == alone
    assert len(set(map(tuple, several))) == 4


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_every_answer_is_another_one(seed: int | None) -> None:
    scheduler = scheduler_of(Spelling("abc"))
    found = [*drawn(scheduler, seed=seed, n=3), *drawn(scheduler, seed=seed, n=3)]
    assert len(set(map(tuple, found))) == 6


def test_n_answers_of_a_loop_run_their_prompt_once() -> None:
    engine, given = Spelling("abc"), dict[int, list[int | None]]()
    scheduler = scheduler_of(engine, shares_prefixes=False)
    params = SamplingParams(temperature=9.0, max_tokens=1, n=4, seed=3)
    with EngineLoop(
        scheduler, lambda a: given.update({n: [t.token_id] for n, t in a.tokens.items()})
    ) as loop:
        numbers = loop.submit([4] * 10, params)
        loop.close(drain_s=60)
    assert given.keys() == set(numbers)
    assert engine.tokens <= 10 + 4 * 4  # the last token is run in each row


def test_generate_returns_n_answers_to_each_prompt_in_their_order(tokenizer: TextTokenizer) -> None:
    engine: Any = Spelling("abc")
    params = SamplingParams(n=3, temperature=9.0, seed=7, max_tokens=5, ignore_eos=True)
    adapters = AdapterStore(engine)
    names, prompts = [None] * 2, [[4, 5], [6]]
    found = answer_all(engine, adapters, prompts, names, [params] * 2, tokenizer)
    assert [answer.index for answer in found] == [0, 1, 2] * 2
    for place, answer in enumerate(found):
        alone = replace(params, n=1, seed=7 + place % 3)
        prompt = prompts[place // 3]
        (one,) = answer_all(engine, adapters, [prompt], [None], [alone], tokenizer)
        assert one.text == answer.text
