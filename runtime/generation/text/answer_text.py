"""Text of an answer as it comes, up to a stop string."""

from collections.abc import Callable, Mapping, Sequence

_PARTIAL = "\ufffd"  # what bytes read as that are no whole character yet
_CONTEXT = 8  # tokens of a prompt that are decoded with its answer; more where they have no text
_LONGEST = 256  # tokens without a whole character, after which they are given as they are


class TextStream:
    """Text of tokens as they come; bytes that are no whole character yet are held back.

    Tokens are decoded behind those before them, so that the pieces are the text of them all:
    decoders strip what a text begins with, and join bytes to characters.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        before: Sequence[int] = (),
        joined: Mapping[int, str] | None = None,
    ) -> None:
        """Begin behind a prompt.

        Args:
            decode: returns the text of token ids.
            before: the tokens of the prompt.
            joined: special tokens that come without a space behind another one, with their text.
        """
        self._decode, self._joined = decode, joined or {}
        count = _CONTEXT
        while count < len(before) and not decode(before[-count:]).strip(_PARTIAL):
            count *= 2
        self._is_joined = False  # the last token is among `joined`
        self._known = self._shown = 0  # tokens whose text is given; characters of the text of all
        self._forget(list(before[-count:]))

    def add(self, token_id: int) -> str:
        """Return the text that a token completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_long = len(self._ids) >= _LONGEST
        whole = text if is_long else text.rstrip(_PARTIAL)
        piece = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if is_long or (piece and whole == text):
            self._forget([] if is_long else self._ids[self._known :])
        was_joined, self._is_joined = self._is_joined, token_id in self._joined
        return self._joined[token_id] if was_joined and self._is_joined else piece

    def end(self) -> str:
        """Return what was held back: half a character at the end reads as one that is damaged."""
        return self._decode(self._ids)[self._shown :]

    def _forget(self, ids: list[int]) -> None:
        """Decode what follows behind these tokens alone, whose text is given already."""
        text = self._decode(ids)
        self._ids, self._shown = ids, len(text.rstrip(_PARTIAL))
        self._known = len(ids) if self._shown == len(text) else 0  # no half of a character is left


class AnswerText:
    """Pieces of a text; what may turn out to be the beginning of a stop string is held back."""

    def __init__(
        self,
        stream: TextStream,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Begin with nothing.

        Args:
            stream: turns tokens into text.
            stop: strings that end it; of those found the one that ends first in the text.
            min_tokens: a stop string that ends in the text of so many tokens does not count.
            include_stop: end it behind the stop string, and not before it.
        """
        self._stream, self._stop, self._include_stop = stream, stop, include_stop
        self._unchecked = min_tokens
        self._held = ""
        self.stopped_by: str | None = None  # the stop string that has come

    def add(self, token_id: int) -> str:
        """Return the text that a token completes, up to a stop string."""
        self._unchecked -= 1
        return self._released(self._stream.add(token_id))

    def end(self) -> str:
        """Return what was held back: nothing follows."""
        text = self._released(self._stream.end()) + self._held
        self._held = ""
        return text

    def _released(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        found = [] if self._unchecked >= 0 else self._found(text, len(self._held))
        if found:
            end, self.stopped_by = min(found, key=lambda place: place[0])
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped_by)]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _found(self, text: str, known: int) -> list[tuple[int, str]]:
        """Where stop strings end, behind what was looked at before."""
        places = [(text.find(s, max(known - len(s) + 1, 0)), s) for s in self._stop]
        return [(at + len(string), string) for at, string in places if at >= 0]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text are the beginning of a longer string."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
