"""Bodies of requests, decoded by msgspec: vLLM 0.33's fields, those that are not done refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.server.errors import HttpError

LONGEST_ID, MOST_SCALE = 256, 1e4
MOST_PROMPTS, MOST_ANSWERS, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 64, 16, 16, 1000, 1024

Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # that MessagePack has

# Fields that ask for what is not done here, and why; None, false and [] ask for nothing.
_REFUSED = {
    "tools": "no tool is called; describe the format in the prompt, or pass response_format",
    "functions": "no function is called; pass response_format",
    "audio": "an engine answers with tokens",
    "mm_processor_kwargs": "an engine reads text",
    "documents": "put them into the messages",
    "logits_processors": "logits are changed by bias, penalties and grammars alone",
    "kv_transfer_params": "caches stay where they are",
    "suffix": "an answer goes on from its prompt; put what follows into the prompt",
    "prompt_embeds": "an engine reads token ids",
    "best_of": "every answer that is made is returned; pass n",
    "tool_choice": "no tool is called; pass response_format",
}

_ASKS_FOR_NOTHING = {"best_of": (1,), "tool_choice": ("none", "auto")}

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
    scale: Annotated[float, msgspec.Meta(ge=-MOST_SCALE, le=MOST_SCALE)] = 1.0


class AdapterRequest(msgspec.Struct):
    """trtllm-serve's way to name an adapter."""

    lora_name: str


class AnswerBody(msgspec.Struct, kw_only=True):
    """What completions and chats ask for alike."""

    tools: Any = None
    functions: Any = None
    audio: Any = None
    mm_processor_kwargs: Any = None
    documents: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    best_of: Any = None
    tool_choice: Any = None
    modalities: list[str] | None = None
    use_beam_search: bool = False

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[Number] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    echo: bool = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # whose tokens go; None: left
    return_tokens_as_token_ids: bool = False
    lora: list[AdapterPart] | None = None
    lora_path: str | None = None  # SGLang's
    lora_request: AdapterRequest | None = None  # trtllm-serve's

    @property
    def wanted_logprobs(self) -> int | None:
        """How many tokens are listed beside each of the answer; None is no list."""
        raise NotImplementedError

    def sampling(self, default: SamplingParams, max_logprobs: int) -> SamplingParams:
        """Return parameters: those of the body, and where it has none those of the model.

        Args:
            default: what the model says.
            max_logprobs: log probabilities beside each token, most.

        Raises:
            HttpError: 400, by the name of the field.
        """
        self._check_refused()
        self._check_sizes(max_logprobs)
        given: dict[str, Any] = {
            name: value for name in _SAME if (value := getattr(self, name)) is not None
        }
        given |= {"logprobs": self.wanted_logprobs, "logit_bias": self._biases()}
        given |= {"structured_outputs": self._structure(), "max_tokens": self.most_tokens()}
        if self.echo and self.wanted_logprobs is not None:
            given["prompt_logprobs"] = self.wanted_logprobs
        try:
            return replace(default, **given)
        except ConfigError as error:
            raise HttpError(400, str(error), named_field(str(error))) from error

    def most_tokens(self) -> int | None:
        """Return how long the answer may be; None is as long as there is room."""
        return self.max_tokens

    def _check_refused(self) -> None:
        for name, why in _REFUSED.items():
            if (given := getattr(self, name)) and given not in _ASKS_FOR_NOTHING.get(name, ()):
                raise HttpError(400, f"{name} is not supported: {why}", name)
        if self.modalities not in (None, ["text"]):
            raise HttpError(
                400, f"modalities is {self.modalities}, expected ['text']", "modalities"
            )
        if self.use_beam_search and self.n > 1:
            raise HttpError(400, "use_beam_search with n above 1 is not supported; pass n=1", "n")

    def _check_sizes(self, max_logprobs: int) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, count, most in (
            ("n", self.n, MOST_ANSWERS),
            ("stop", len(stops), MOST_STOPS),
            ("stop", max(map(len, stops), default=0), LONGEST_STOP),
            ("request_id", len(self.request_id or ""), LONGEST_ID),
            ("logit_bias", len(self.logit_bias or ()), MOST_BIASES),
            ("logprobs", self.wanted_logprobs or 0, max_logprobs),
            ("prompt_logprobs", self.prompt_logprobs or 0, max_logprobs),
        ):
            if not 0 <= count <= most:
                raise HttpError(400, f"{name} is {count}, expected 0 to {most}", name)
        if self.n < 1:
            raise HttpError(400, f"n is {self.n}, expected 1 to {MOST_ANSWERS}", "n")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise HttpError(
                400,
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}, expected 1 or more",
                "truncate_prompt_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise HttpError(
                400, "stream_options is there, and stream is not true", "stream_options"
            )

    def _biases(self) -> dict[int, float] | None:
        try:
            found = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise HttpError(
                400, f"logit_bias has a key that is no token: {error}", "logit_bias"
            ) from error
        if found and not 0 <= max(found, key=abs) < 1 << 63:
            text = f"logit_bias has a key that is no token: {max(found, key=abs)}"
            raise HttpError(400, f"{text:.100}", "logit_bias")
        return found or None

    def _structure(self) -> StructuredOutputsParams | None:
        wanted = dict(self.structured_outputs or {})
        if self.response_format is not None and self.response_format.type != "text":
            wanted["json"] = _schema(self.response_format)
        wanted = {name: value for name, value in wanted.items() if value is not None}
        if (choices := wanted.pop("choice", None)) is not None:
            wanted["grammar"] = _choice(choices)
        if not wanted:
            return None
        if unknown := wanted.keys() - {"json", "regex", "grammar"}:
            raise HttpError(
                400,
                f"structured_outputs has {sorted(unknown)}, expected json, regex, choice or "
                "grammar",
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

    @property
    def wanted_logprobs(self) -> int | None:
        """See `AnswerBody`."""
        return self.logprobs

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
        if not all(isinstance(p, str) or (isinstance(p, list) and _are_ids(p)) for p in found):
            raise HttpError(400, "prompt has what is neither text nor token ids", "prompt")
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
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """See `AnswerBody`.

        Raises:
            HttpError: 400; a number is given, and nothing is to be listed.
        """
        if self.top_logprobs and not self.logprobs:
            raise HttpError(
                400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None

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


def _are_ids(prompt: list[Any]) -> bool:
    """Whether it may be token ids, as far as the first one tells; the engine looks at all."""
    return not prompt or isinstance(prompt[0], int)


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


def _choice(choices: object) -> str:
    """The grammar of one of some texts."""
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise HttpError(
            400,
            f"structured_outputs has choice {choices!r:.80}, expected a list of strings",
            "structured_outputs",
        )
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def named_field(message: str) -> str | None:
    """Return the field of a body that a message begins with."""
    word = message.split(" ", 1)[0].rstrip(":,")
    return word if word in CompletionBody.__struct_fields__ else None
