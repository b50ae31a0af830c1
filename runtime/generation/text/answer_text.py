"""Text of an answer as it comes, up to a stop string."""

from collections.abc import Sequence

from trt_lora.runtime.generation.text.tokenizer import TextStream


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
            stop: strings that end it; of those found the first in the text.
            min_tokens: the text of so many tokens is not looked at.
            include_stop: end it behind the stop string, and not before it.
        """
        self._stream, self._stop, self._include_stop = stream, stop, include_stop
        self._unchecked = min_tokens
        self._held = ""
        self.stopped_by: str | None = None  # the stop string that has come

    def add(self, token_id: int) -> str:
        """Return the text that a token completes, up to a stop string."""
        piece = self._stream.add(token_id)
        if self._unchecked:
            self._unchecked -= 1
            return piece
        return self._released(piece)

    def end(self) -> str:
        """Return what was held back: nothing follows."""
        text = self._released(self._stream.end()) + self._held
        self._held = ""
        return text

    def _released(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        found = [(at, string) for string in self._stop if (at := text.find(string)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda place: place[0])
            self._held = ""
            return text[: at + len(self.stopped_by)] if self._include_stop else text[:at]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text are the beginning of a longer string."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
