"""Structured output: which tokens a JSON schema, a regex or a grammar allows next.

The only file that imports llguidance.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr

if TYPE_CHECKING:
    import llguidance

_WORD = 32  # tokens in a word of a mask


@short_repr
@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer has to be; exactly one is given. Names are vLLM's."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as an object
    regex: str | None = None  # in the syntax of Rust's crate, for the whole answer
    # In Lark's syntax. llguidance may never return from one that no finite text satisfies
    # (`start: /a+/ start`), so take grammars from people you trust.
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Refuse none and several.

        Raises:
            ConfigError: there is not exactly one, or it is of another type.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            names = " and ".join(given) or "nothing"
            raise ConfigError(
                f"structured_outputs has {names}, expected one of json, regex and grammar"
            )
        ((name, value),) = given.items()
        if not isinstance(value, str) and not (name == "json" and isinstance(value, Mapping)):
            kind = "a JSON schema: text or an object" if name == "json" else "text"
            raise ConfigError(f"structured_outputs has {name} {shown(value)}, expected {kind}")
        if isinstance(value, Mapping):
            _json_text(value)


class Constraint:
    """How far one answer has come in what it has to be."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocabulary: int) -> None:
        """Begin; `vocabulary` is the width of the logits."""
        self._matcher = matcher
        self._mask = np.zeros(-(-vocabulary // _WORD), np.int32)  # a bit for each token
        self._find_allowed()

    @property
    def error(self) -> str:
        """Why it cannot go on, such as a grammar that became too large; empty where it can."""
        if found := self._matcher.get_error():
            return found
        if self.is_complete or self._mask.any():
            return ""
        return "no token of this model is allowed next"

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow: the answer ends here."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def masked(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return logits [vocab] that are -inf where a token is not allowed."""
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: logits.size]
        return np.where(bits, logits, np.float32(-np.inf))

    def accept(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the answer; see `error` where one is not allowed."""
        self._matcher.consume_tokens(list(tokens))
        self._find_allowed()

    def _find_allowed(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)


class Grammars:
    """Constraints over the tokens of one tokenizer; making one reads its whole vocabulary."""

    def __init__(self, tokenizer_json: str, vocabulary: int, stop_token_ids: Sequence[int]) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_json: the text of `tokenizer.json`.
            vocabulary: the width of the logits.
            stop_token_ids: one is allowed where the answer may end, and nowhere else.

        Raises:
            BackendError: llguidance is not installed.
            ConfigError: there is no stop token, or llguidance cannot read the tokenizer.
        """
        with extra("structured", "structured output"):
            import llguidance
        if not stop_token_ids:
            raise ConfigError(
                "structured output needs a token that ends an answer, and there is none; pass "
                "stop_token_ids"
            )
        self._vocabulary = vocabulary
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocabulary, eos_token=list(stop_token_ids)
            )
        except ValueError as error:
            raise ConfigError(
                f"structured output cannot take this engine's tokenizer: {error}"
            ) from error

    def constraint(self, params: StructuredOutputsParams) -> Constraint:
        """Return what an answer has to be, at its beginning.

        Raises:
            ConfigError: llguidance cannot read it, or does not know a keyword of the schema.
        """
        import llguidance

        try:
            matcher = llguidance.LLMatcher(self._tokenizer, _grammar(params), log_level=0)
        except ValueError as error:
            raise _refused(params, str(error)) from error
        constraint = Constraint(matcher, self._vocabulary)
        if constraint.error:
            raise _refused(params, constraint.error)
        return constraint


def _grammar(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form, which is text."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    schema = params.json or ""
    text = schema if isinstance(schema, str) else _json_text(schema)
    return LLMatcher.grammar_from_json_schema(text)


def _json_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"structured_outputs has json {shown(schema)}, which is no JSON: {error}"
        ) from error


def _refused(params: StructuredOutputsParams, reason: str) -> ConfigError:
    (name,) = (f.name for f in fields(params) if getattr(params, f.name) is not None)
    reason = " ".join(reason.split())  # it draws pictures of several lines
    return ConfigError(f"structured_outputs has a {name} that llguidance refuses: {reason}")
