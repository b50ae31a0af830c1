"""Bodies of requests, decoded by msgspec: vLLM 0.33's fields, those that are not done refused."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.server.errors import HttpError

MOST_PROMPTS, MOST_ANSWERS, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 64, 16, 16, 1000, 1024

BodyT = TypeVar("BodyT")

# Fields of `SamplingParams` that a body has under the same name; None leaves the default.
_SAME = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs"),
)


class StreamOptions(msgspec.Struct):
    """Whether a stream tells how many tokens there were: at its end, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to ask for JSON."""

    type: str
    json_schema: Mapping[str, Any] | None = None


class AdapterPart(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter of a blend that one request makes, or its strength."""

    name: str
    scale: float = 1.0


class AnswerBody(msgspec.Struct, kw_only=True):
    """What completions and chats ask for alike."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "use_beam_search": "answers are drawn or greedy",
        "tools": "no tool is called",
        "audio": "an engine reads tokens",
        "modalities": "an engine reads tokens",
    }

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    lora: list[AdapterPart] | None = None
    lora_path: str | None = None

    def sampling(self, default: SamplingParams, logprobs: int | None) -> SamplingParams:
        """Return parameters: those of the body, and where it has none those of the model.

        Raises:
            HttpError: 400, by the name of the field.
        """
        self._check_sizes()
        given: dict[str, Any] = {
            name: value for name in _SAME if (value := getattr(self, name)) is not None
        }
        given |= {"logprobs": logprobs, "logit_bias": self._biases()}
        given |= {"structured_outputs": self._structure(), "max_tokens": self.most_tokens()}
        try:
            return replace(default, **given)
        except ConfigError as error:
            raise HttpError(400, str(error), _named(str(error), given)) from error

    def most_tokens(self) -> int | None:
        """Return how long the answer may be; None is as long as there is room."""
        return self.max_tokens

    def _check_sizes(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, count, most in (
            ("n", self.n, MOST_ANSWERS),
            ("stop", len(stops), MOST_STOPS),
            ("stop", max(map(len, stops), default=0), LONGEST_STOP),
            ("logit_bias", len(self.logit_bias or ()), MOST_BIASES),
        ):
            if count > most:
                raise HttpError(400, f"{name} is {count}, expected {most} at most", name)
        if self.stream_options is not None and not self.stream:
            raise HttpError(
                400, "stream_options is there, and stream is not true", "stream_options"
            )

    def _biases(self) -> dict[int, float] | None:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None
        except ValueError as error:
            raise HttpError(
                400, f"logit_bias has a key that is no token: {error}", "logit_bias"
            ) from error

    def _structure(self) -> StructuredOutputsParams | None:
        wanted = dict(self.structured_outputs or {})
        if self.response_format is not None and self.response_format.type != "text":
            wanted["json"] = _schema(self.response_format)
        if not wanted:
            return None
        if unknown := wanted.keys() - {"json", "regex", "grammar"}:
            raise HttpError(
                400,
                f"structured_outputs has {sorted(unknown)}; expected json, regex or grammar",
                "structured_outputs",
            )
        try:
            return StructuredOutputsParams(**wanted)
        except ConfigError as error:
            raise HttpError(400, str(error), "structured_outputs") from error


class CompletionBody(AnswerBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]  # text, token ids, or a list of either
    logprobs: int | None = None
    echo: bool = False

    def most_tokens(self) -> int | None:
        """Return vLLM's default of 16 where nothing is asked for."""
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[Prompt]:
        """Return the prompts, one or several.

        Raises:
            HttpError: 400; there is none, or there are too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise HttpError(400, "prompt is empty; give text, or token ids", "prompt")
        found: list[Any] = self.prompt if not isinstance(self.prompt[0], int) else [self.prompt]
        if len(found) > MOST_PROMPTS:
            raise HttpError(
                400, f"prompt has {len(found)} prompts, expected {MOST_PROMPTS} at most", "prompt"
            )
        return found


class ChatBody(AnswerBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def most_tokens(self) -> int | None:
        """Return OpenAI's newer name before the older one."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def prompts(self) -> list[Prompt]:
        """Return the conversation.

        Raises:
            HttpError: 400; it has a message that is none, or a template of its own.
        """
        if self.chat_template is not None:
            raise HttpError(
                400, "chat_template is given, and only the model's own is run", "chat_template"
            )
        try:
            return [
                Chat(
                    self.messages,
                    add_generation_prompt=self.add_generation_prompt,
                    continue_final_message=self.continue_final_message,
                    chat_template_kwargs=self.chat_template_kwargs or {},
                )
            ]
        except ConfigError as error:
            raise HttpError(400, str(error), "messages") from error


class TokenizeBody(msgspec.Struct):
    """`POST /tokenize`: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class LoadBody(msgspec.Struct):
    """`POST /v1/load_lora_adapter`; `expected_version` is ours."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    expected_version: int | None = None


class UnloadBody(msgspec.Struct):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def decoded(raw: bytes, kind: type[BodyT]) -> BodyT:
    """Return a body of JSON.

    Raises:
        HttpError: 400; it is no JSON, lacks a field, or has one of another type. As in vLLM, fields
            that are unknown are ignored; those that are known and not done here are refused.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(400, f"1 validation error:\n  {error}", kind="Bad Request") from error


def _schema(wanted: ResponseFormat) -> object:
    if wanted.type == "json_object":
        return {"type": "object"}
    schema = (wanted.json_schema or {}).get("schema")
    if wanted.type != "json_schema" or schema is None:
        raise HttpError(
            400,
            f"response_format is {wanted.type!r}, expected text, json_object or json_schema",
            "response_format",
        )
    return schema


def _named(message: str, given: Sequence[str] | Mapping[str, Any]) -> str | None:
    """The field that a message begins with."""
    word = message.split(" ", 1)[0].rstrip(":,")
    return word if word in given else None
