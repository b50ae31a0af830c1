"""Text up to a stop string, whatever pieces it comes in, and behind whatever prompt."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trt_lora.runtime.generation.text.answer_text import AnswerText, TextStream
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer

# ----------------------------------------------------------------------------------- stop strings


def stream_of(pieces: Sequence[str]) -> TextStream:
    """Tokens are numbers of pieces."""
    return TextStream(lambda ids: "".join(pieces[i] for i in ids))


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """By definition: where a stop string ends first, whatever the pieces are; else -1."""
    ends = ((n, stop) for n in range(len(text) + 1) for stop in stops if text[:n].endswith(stop))
    return next(ends, (-1, ""))


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text("abc", max_size=4), max_size=8)


@settings(max_examples=400, deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_the_pieces_are_the_text_before_the_stop_string_that_ends_first(
    pieces: list[str], stops: list[str], includes: bool
) -> None:
    text = AnswerText(stream_of(pieces), stops, include_stop=includes)
    given_out, taken = "", ""
    for token, piece in enumerate(pieces):
        taken += piece
        given_out += text.add(token)
        assert (text.stopped_by is not None) == any(stop in taken for stop in stops)
        if text.stopped_by is not None:
            break
    given_out += text.end()
    end, stop = first_stop("".join(pieces), stops)
    assert text.stopped_by == (stop or None)
    whole = taken if end < 0 else taken[:end]
    assert given_out == (whole if includes else whole.removesuffix(stop))


@settings(max_examples=200, deadline=None)
@given(PIECES, STOPS)
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


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS, st.integers(0, 5))
def test_a_stop_string_that_ends_in_the_text_of_the_first_tokens_does_not_count(
    pieces: list[str], stops: list[str], least: int
) -> None:
    text, given_out = AnswerText(stream_of(pieces), stops, min_tokens=least), ""
    for token in range(len(pieces)):
        given_out += text.add(token)
        if text.stopped_by is not None:
            break
    given_out += text.end()
    whole, early = "".join(pieces), len("".join(pieces[:least]))
    ends = [n for n in range(early + 1, len(whole) + 1) if whole[:n].endswith(tuple(stops or "\0"))]
    assert (text.stopped_by is not None) == bool(ends)
    if text.stopped_by is not None:
        whole = whole[: ends[0]].removesuffix(text.stopped_by)
    assert given_out == whole


def test_nothing_follows_a_stop_string() -> None:
    text = AnswerText(stream_of(["a", "b", "c"]), ["b"])
    assert [text.add(token) for token in range(3)] == ["a", "", ""]
    assert text.end() == ""


# --------------------------------------------------------------------------- behind their prompt

WORDS = ("▁a", "▁b", "a", "b", "▁", "ing", "▁the", "é")


def byte_level() -> Tokenizer:
    """A token for every byte, some of two and three, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ã", "©"), ("a", "b"), ("ä", "½"), ("©", "Ġ")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """As Llama's: spaces are ▁, and what has no token is bytes; a first space is stripped."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<unk>"]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def metaspace() -> Tokenizer:
    """As T5's: whole pieces, and a decoder that strips the first space."""
    tokens = ["<unk>", *WORDS, "<0xC3>"]
    made = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, "<unk>"))
    made.decoder = decoders.Metaspace()
    return made


MAKERS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}
TOKENIZERS: dict[str, TextTokenizer] = {}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a tokenizer with the special tokens <s> and </s>."""
    made, folder = MAKERS[request.param](), tmp_path_factory.mktemp("tokenizer")
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    TOKENIZERS[request.param] = TextTokenizer(folder)
    return str(request.param)


def ids_of(name: str, text: str) -> list[int]:
    """The tokens of a text; the second tokenizer has words and bytes, the third words alone."""
    if name == "byte level":
        return TOKENIZERS[name].encode_text(text)
    first = 1 if name == "metaspace" else 256
    found: list[int] = []
    for char in text:
        at = next((n for n, word in enumerate(WORDS) if word == char.replace(" ", "▁")), None)
        if at is not None:
            found.append(first + at)
        elif name == "byte fallback":
            found += char.encode()
    return found


PARTS = st.sampled_from([" a", "a", " the", "ing ", " ", "é", "漢字", "😀", "\ufffd", "b b"])
TEXTS = st.lists(PARTS, max_size=10).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(0, 60), st.lists(st.sampled_from(["<s>", "</s>"]), max_size=3))
def test_prompt_and_pieces_are_the_text_of_all_tokens_wherever_the_answer_begins(
    tokenizer: str, text: str, at: int, special: list[str]
) -> None:
    """Even in the middle of a character, whose text is the answer's then."""
    found = TOKENIZERS[tokenizer]
    ids = ids_of(tokenizer, text)
    tokens = [found._tokenizer.token_to_id(token) or 0 for token in special]
    prompt, answer = [*ids[:at], *tokens], ids[at:]
    for skips in (True, False):
        stream = found.stream(prompt, skip_special_tokens=skips)
        pieces = [stream.add(token) for token in answer]
        given_out = "".join([*pieces, stream.end()])
        whole = found.decode([*prompt, *answer], skip_special_tokens=skips)
        known = found.decode(prompt, skip_special_tokens=skips).rstrip("\ufffd")
        assert known + given_out == whole


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_that_are_no_text_raise_nothing_and_hide_nothing_behind_them(
    tokenizer: str, data: st.DataObject
) -> None:
    found = TOKENIZERS[tokenizer]
    size = found._tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    at = data.draw(st.integers(0, len(ids)))
    stream = found.stream(ids[:at])
    pieces = [stream.add(token) for token in ids[at:]]
    given_out = "".join([*pieces, stream.end()])
    if tokenizer == "byte level":  # others take back what they have read of bytes
        known = found.decode(ids[:at]).rstrip("\ufffd")
        assert known + given_out == found.decode(ids)
    behind = ids_of(tokenizer, " a b")
    assert "".join(map(stream.add, behind)).endswith("a b")


def test_a_flood_of_bytes_that_are_no_text_is_decoded_in_parts() -> None:
    longest, taken = 0, 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "\ufffd" * len(ids)

    stream = TextStream(decode)
    for token in range(2000):
        taken += len(stream.add(token))
    assert taken + len(stream.end()) == 2000
    assert longest < 300


def test_the_first_piece_has_the_space_that_its_place_asks_for(tokenizer: str) -> None:
    found = TOKENIZERS[tokenizer]
    space = ids_of(tokenizer, " a")
    assert found.stream(ids_of(tokenizer, "b")).add(space[-1]) == (
        "a" if len(space) > 1 else " a"
    )  # words that begin with a space have one
    stream = found.stream(ids_of(tokenizer, "b"))
    assert "".join(map(stream.add, space)) == " a"


def test_a_character_in_two_halves_comes_with_the_second(tokenizer: str) -> None:
    found = TOKENIZERS[tokenizer]
    if tokenizer == "metaspace":  # which has no bytes
        assert found.stream().add(ids_of(tokenizer, "é")[0]) == "é"
        return
    halves = ids_of(tokenizer, "漢")
    stream = found.stream()
    assert [stream.add(token) for token in halves][:-1] == [""] * (len(halves) - 1)
    stream = found.stream()
    assert stream.add(halves[0]) == ""
    assert set(stream.end()) == {"\ufffd"}


def test_a_stop_string_of_several_bytes_a_character_is_found(tokenizer: str) -> None:
    found = TOKENIZERS[tokenizer]
    ids = ids_of(tokenizer, "aé ab aé")
    text = AnswerText(found.stream(), ["é "])
    pieces = [text.add(token) for token in ids]
    assert ("".join(pieces), text.stopped_by) == ("a", "é ")


@pytest.mark.parametrize(("spaces", "expected"), [(True, "a <s> </s> </s>"), (False, "a <s></s>")])
def test_special_tokens_come_with_or_without_spaces_between_them(
    tmp_path: Path, spaces: bool, expected: str
) -> None:
    """A tokenizer without a decoder puts a space between all tokens."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"))
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    stream = TextTokenizer(tmp_path).stream(
        skip_special_tokens=False, spaces_between_special_tokens=spaces
    )
    pieces = [stream.add(token) for token in (1, 2, 3, 3)]
    assert "".join(pieces[: 4 if spaces else 3]) == expected
    assert stream.add(1) == " a"
