"""Text of an answer as it comes, up to a stop string."""

from collections.abc import Sequence

from trt_lora.runtime.generation.text.tokenizer import TextStream


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop string in it; all of it where there is none."""
    found = (at for string in stop if (at := text.find(string)) >= 0)
    return text[: min(found, default=len(text))]


class AnswerText:
    """Pieces of a text; what may turn out to be the beginning of a stop string is held back."""

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        """Begin with nothing.

        Args:
            stream: turns tokens into text.
            stop: strings that end it.
        """
        self._stream, self._stop = stream, stop
        self._held = ""
        self.is_stopped = False  # whether a stop string has come

    def add(self, token_id: int) -> str:
        """Return the text that a token completes, up to a stop string."""
        return self._released(self._stream.add(token_id))

    def end(self) -> str:
        """Return what was held back: nothing follows."""
        text = self._released(self._stream.end()) + self._held
        self._held = ""
        return text

    def _released(self, piece: str) -> str:
        text = self._held + piece
        kept = before_stop(text, self._stop)
        if len(kept) < len(text):
            self.is_stopped, self._held = True, ""
            return kept
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text are the beginning of a longer string."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
