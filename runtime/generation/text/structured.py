"""Structured output: which tokens a JSON schema, a regex or a grammar allows next."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.text import grammar_compiler
from trt_lora.runtime.generation.text.chat_template import check_characters
from trt_lora.runtime.generation.text.grammar_process import GrammarProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WORD = 32  # tokens in a word of a mask
_MOST_BYTES = 1 << 16  # of a grammar's text
_DEAD_END = "NoExtensionBias"  # llguidance's name for it


@short_repr
@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer has to be; exactly one is given. Names are vLLM's."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as an object
    regex: str | None = None  # in the syntax of Rust's crate, for the whole answer
    grammar: str | None = None  # in Lark's syntax

    def __post_init__(self) -> None:
        """Refuse none and several.

        Raises:
            ConfigError: there is not exactly one, or it is of another type, no JSON, or too long.
        """
        check_fields(self)
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "nothing"
            raise ConfigError(
                f"structured_outputs has {names}, expected one of json, regex and grammar"
            )
        text = self.text
        check_characters(text, f"the {self.kind} of structured_outputs")
        if (size := len(text.encode())) > _MOST_BYTES:
            raise ConfigError(
                f"structured_outputs has a {self.kind} of {size} bytes, expected {_MOST_BYTES} at "
                "most"
            )

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def text(self) -> str:
        """What is given, as text."""
        value = getattr(self, self.kind)
        return _json_text(value) if self.kind == "json" else str(value)


class Constraint:
    """How far one answer has come in what it has to be."""

    def __init__(
        self, matcher: "LLMatcher", vocabulary: int, stop: int, stop_token_ids: Sequence[int]
    ) -> None:
        """Begin.

        Args:
            matcher: at the beginning, where it stays.
            vocabulary: the width of the logits.
            stop: the token that the matcher allows where the answer may end.
            stop_token_ids: those that are allowed there instead, and nowhere else.
        """
        self._beginning, self._stop, self._stops = matcher, stop, list(stop_token_ids)
        self._mask = np.zeros(-(-vocabulary // _WORD), np.int32)  # a bit for each token
        self.restart()

    @property
    def error(self) -> str:
        """Why it cannot go on, such as a grammar that became too large; empty where it can."""
        found = self._matcher.get_error()
        if self.is_complete or (self._allowed.any() and not found):
            return ""
        is_dead_end = not found or _DEAD_END in found
        return "no token of this model is allowed next" if is_dead_end else found

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow: the answer ends here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def restart(self, tokens: Sequence[int] = ()) -> None:
        """Go back to the beginning, and take the tokens of an answer."""
        self._matcher = self._beginning.deep_copy()
        self.accept(tokens)

    def masked(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return logits [vocab] that are -inf where a token is not allowed."""
        return np.where(self._allowed[: logits.size], logits, np.float32(-np.inf))

    def accept(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the answer; see `error` where one is not allowed."""
        self._matcher.consume_tokens(list(tokens))
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little").view(np.bool_)
        self._allowed[self._stop] = False
        self._allowed[self._stops] = self._matcher.is_accepting()


class Grammars:
    """Constraints over the tokens of one tokenizer, of which the whole vocabulary is read."""

    def __init__(self, tokenizer_json: str, vocabulary: int, stop: int) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_json: the text of `tokenizer.json`.
            vocabulary: the width of the logits.
            stop: a token that is no text: one that ends answers.

        Raises:
            BackendError: llguidance is not installed.
            ConfigError: llguidance cannot read the tokenizer.
        """
        self.key = vocabulary, stop
        arguments = (tokenizer_json, vocabulary, stop)
        try:
            with extra("structured", "structured output"):
                self._tokenizer = grammar_compiler.new_tokenizer(*arguments)
        except ValueError as error:
            raise ConfigError(
                f"structured output cannot take this engine's tokenizer: {error}"
            ) from error
        self._process = GrammarProcess(*arguments)

    def constraint(
        self, params: StructuredOutputsParams, stop_token_ids: Sequence[int]
    ) -> Constraint:
        """Return what an answer has to be, at its beginning.

        A grammar that was not seen before is tried in another process. Whatever happens to this
        answer's, those of others go on: each has a lexer of its own.

        Args:
            params: the grammar.
            stop_token_ids: that end the answer.

        Raises:
            ConfigError: llguidance cannot read it, does not know a keyword of the schema, or takes
                too much time, memory or stack; or no token ends the answer.
            BackendError: no other process can be started.
        """
        if not stop_token_ids:
            raise ConfigError(
                "structured output needs a token that ends an answer, and there is none; pass "
                "stop_token_ids"
            )
        grammar = grammar_compiler.serialized(params.kind, params.text)
        if failure := self._process.failure(grammar):
            raise _refused(params.kind, failure)
        matcher = grammar_compiler.compiled(self._tokenizer, grammar)
        constraint = Constraint(matcher, *self.key, stop_token_ids)
        if constraint.error:
            raise _refused(params.kind, constraint.error)
        return constraint


def _refused(kind: str, reason: str) -> ConfigError:
    reason = " ".join(reason.split())  # it draws pictures of several lines
    return ConfigError(f"structured_outputs has a {kind} that llguidance refuses: {reason}")


def _json_text(schema: str | Mapping[str, Any]) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"structured_outputs has json {shown(schema)}, which is no JSON: {error}"
        ) from error
