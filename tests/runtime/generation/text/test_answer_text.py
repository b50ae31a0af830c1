"""Text up to a stop string, whatever pieces it comes in."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.runtime.generation.text.answer_text import AnswerText
from trt_lora.runtime.generation.text.tokenizer import TextStream, TextTokenizer


def stream_of(pieces: Sequence[str]) -> TextStream:
    """Tokens are numbers of pieces."""
    return TextStream(pieces.__getitem__, lambda ids: "".join(pieces[i] for i in ids))


def before_stop(text: str, stops: Sequence[str]) -> str:
    """By definition: all before the first place where a stop string begins."""
    return next((text[:at] for at in range(len(text)) if text[at:].startswith(tuple(stops))), text)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_the_pieces_are_the_text_before_the_first_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    text, given_out, taken = AnswerText(stream_of(pieces), stops), "", ""
    for token, piece in enumerate(pieces):
        taken += piece
        given_out += text.add(token)
        assert (text.stopped_by is not None) == any(stop in taken for stop in stops)
        if text.stopped_by is not None:
            break
    given_out += text.end()
    assert given_out == before_stop(taken, stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_nothing_more_is_held_back_than_may_begin_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    text, given_out, taken = AnswerText(stream_of(pieces), stops), "", ""
    for token, piece in enumerate(pieces):
        given_out += text.add(token)
        if text.stopped_by is not None:
            return
        taken += piece
        held = taken.removeprefix(given_out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return TextTokenizer(tmp_path)


def test_a_stop_string_of_several_bytes_a_character_is_found(tokenizer: TextTokenizer) -> None:
    text = AnswerText(tokenizer.stream(), ["é!"])
    pieces = [text.add(token) for token in tokenizer.encode("zoé, né!")]
    assert "".join(pieces) == "zoé, n"
    assert text.stopped_by == "é!"
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_the_stop_string_comes_too_where_it_is_asked_for(
    pieces: list[str], stops: list[str]
) -> None:
    text, given_out, taken = AnswerText(stream_of(pieces), stops, include_stop=True), "", ""
    for token, piece in enumerate(pieces):
        taken += piece
        given_out += text.add(token)
        if text.stopped_by is not None:
            break
    given_out += text.end()
    stop = text.stopped_by or ""
    assert given_out == before_stop(taken, stops) + stop
    assert stop in {"", *stops}


def test_the_text_of_the_first_tokens_is_not_looked_at() -> None:
    text = AnswerText(stream_of(["a.", "b.", "c", ".d"]), ["."], min_tokens=2)
    assert [text.add(token) for token in range(4)] == ["a.", "b.", "c", ""]
    assert text.stopped_by == "."


def test_nothing_follows_a_stop_string() -> None:
    text = AnswerText(stream_of(["a", "b", "c"]), ["b"])
    assert [text.add(token) for token in range(3)] == ["a", "", ""]
    assert text.end() == ""
