"""Bodies of requests, decoded by msgspec: vLLM 0.33's fields, those that are not done refused."""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.server.answers.refused_fields import RefusedFields
from trt_lora.runtime.server.answers.structures import ResponseFormat, structure
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.json_values import Number

LONGEST_ID, MOST_SCALE = 256, 1e4
MOST_PROMPTS, MOST_ANSWERS, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 64, 16, 16, 1000, 1024

_MOST_BIAS = 100.0  # of a token, as in vLLM
_LONGEST_SALT, _NOT_IN_SALT = 128, frozenset("@/\\\0")


# Fields of `SamplingParams` that a body has under the same name; None leaves the default.
SAME_FIELDS = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids"),
)


class StreamOptions(msgspec.Struct):
    """Whether a stream tells how many tokens there were: at its end, or in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class AdapterPart(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter of a blend that one request makes, or its strength."""

    name: str
    scale: Annotated[float, msgspec.Meta(ge=-MOST_SCALE, le=MOST_SCALE)] = 1.0


class AdapterRequest(msgspec.Struct):
    """trtllm-serve's way to name an adapter."""

    lora_name: str


class AnswerBody(RefusedFields, kw_only=True):
    """What completions and chats ask for alike."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = 1
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
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[Number] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[Number] | None = None  # listed beside each token instead of the best
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None  # tokens of an event
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # -1: as many as there is room for
    truncation_side: Literal["left", "right"] | None = None  # whose tokens go; None: left
    return_tokens_as_token_ids: bool | None = None  # None: as the server's flag says
    use_beam_search: bool = False  # of one beam: the best token each time
    lora: list[AdapterPart] | AdapterPart | None = None
    lora_path: str | list[str | None] | None = None  # SGLang's; of several prompts one each
    lora_request: AdapterRequest | None = None  # trtllm-serve's

    @property
    def wanted_logprobs(self) -> int | None:
        """How many tokens are listed beside each of the answer; None is no list."""
        raise NotImplementedError

    @property
    def other_names(self) -> dict[str, str]:
        """What a body calls fields of `SamplingParams` that it has under another name."""
        return {}

    def sampling(self, default: SamplingParams, max_logprobs: int) -> SamplingParams:
        """Return parameters: those of the body, and where it has none those of the model.

        Args:
            default: what the model says.
            max_logprobs: log probabilities beside each token, most.

        Raises:
            HttpError: 400, by the name of the field.
        """
        self.check_refused()
        self._check_sizes(max_logprobs)
        self._check_contradictions()
        given: dict[str, Any] = {
            name: value for name in SAME_FIELDS if (value := getattr(self, name)) is not None
        }
        given |= {"logprobs": None if self.logprob_token_ids else self.wanted_logprobs}
        given |= {"logit_bias": self._biases(), "max_tokens": self.most_tokens()}
        given["structured_outputs"] = structure(self.response_format, self.structured_outputs)
        if self.use_beam_search:
            given["temperature"] = 0.0
        if self.echo and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self._echoed_logprobs()
        try:
            return replace(default, **given)
        except ConfigError as error:
            text = str(error)
            for ours, theirs in self.other_names.items():
                text = re.sub(rf"^{ours}\b", theirs, text)
            raise HttpError(400, text, named_field(text)) from error

    def most_tokens(self) -> int | None:
        """Return how long the answer may be; None is as long as there is room."""
        return self.max_tokens

    def parts(self) -> list[AdapterPart]:
        """Return the adapters of a blend."""
        return [self.lora] if isinstance(self.lora, AdapterPart) else self.lora or []

    def named_adapters(self) -> list[str]:
        """Return what names an adapter beside `model`.

        Raises:
            HttpError: 400; a list has another adapter for each prompt.
        """
        path, asked = self.lora_path, self.lora_request
        if isinstance(path, list):
            if len(set(path)) > 1:
                text = "lora_path names several adapters; send a request for each"
                raise HttpError(400, text, "lora_path")
            path = path[0] if path else None
        return [*filter(None, (path, asked.lora_name if asked else None))]

    def _echoed_logprobs(self) -> int | None:
        """How many tokens are listed beside each of the prompt, where that is echoed."""
        raise NotImplementedError

    def _check_sizes(self, max_logprobs: int) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, count, most in (
            ("stop", len(stops), MOST_STOPS),
            ("stop", max(map(len, stops), default=0), LONGEST_STOP),
            ("request_id", len(self.request_id or ""), LONGEST_ID),
            ("logit_bias", len(self.logit_bias or ()), MOST_BIASES),
        ):
            if count > most:
                raise HttpError(400, f"{name} is {count}, expected 0 to {most}", name)
        for name, wanted in (
            (self.other_names.get("logprobs", "logprobs"), self.wanted_logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            if max_logprobs != -1 and not 0 <= (wanted or 0) <= max_logprobs:
                raise HttpError(400, f"{name} is {wanted}, expected 0 to {max_logprobs}", name)
        answers, kept = self.n, self.truncate_prompt_tokens
        if answers is not None and not 1 <= answers <= MOST_ANSWERS:
            raise HttpError(400, f"n is {answers}, expected 1 to {MOST_ANSWERS}", "n")
        if kept is not None and kept < 1 and kept != -1:
            text = f"truncate_prompt_tokens is {kept}, expected 1 or more, or -1"
            raise HttpError(400, text, "truncate_prompt_tokens")

    def _check_contradictions(self) -> None:
        salt = self.cache_salt
        if salt is not None and (not 0 < len(salt) <= _LONGEST_SALT or set(salt) & _NOT_IN_SALT):
            text = f"cache_salt is empty, longer than {_LONGEST_SALT} or has one of @ / \\ NUL"
            raise HttpError(400, text, "cache_salt")
        if self.use_beam_search and self.n not in (None, 1):
            raise HttpError(400, "use_beam_search with n above 1 is not supported; pass n=1", "n")
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            text = "stream_options is there, and stream is not true"
            raise HttpError(400, text, "stream_options")
        if self.stream and self.prompt_logprobs:
            text = "`prompt_logprobs` are not available when `stream=True`."
            raise HttpError(400, text, "prompt_logprobs")
        if self.logprob_token_ids and self.wanted_logprobs is None:
            text = "when using `logprob_token_ids`, `logprobs` must be set."
            raise HttpError(400, text, "logprob_token_ids")

    def _biases(self) -> dict[int, float] | None:
        try:
            given = (self.logit_bias or {}).items()
            found = {int(token): max(min(bias, _MOST_BIAS), -_MOST_BIAS) for token, bias in given}
        except ValueError as error:
            raise HttpError(
                400, f"logit_bias has a key that is no token: {error}", "logit_bias"
            ) from error
        if found and not 0 <= max(found, key=abs) < 1 << 63:
            text = f"logit_bias has a key that is no token: {max(found, key=abs)}"
            raise HttpError(400, f"{text:.100}", "logit_bias")
        return found or None


class CompletionBody(AnswerBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]  # text, token ids, or a list of either
    logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """See `AnswerBody`."""
        return self.logprobs

    @property
    def has_no_answer(self) -> bool:
        """Whether the prompt alone is echoed; the one token that is made for it is not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def most_tokens(self) -> int | None:
        """Return vLLM's default of 16 where nothing is asked for."""
        if self.has_no_answer:
            return 1
        return 16 if self.max_tokens is None else self.max_tokens

    def _echoed_logprobs(self) -> int | None:
        """See `AnswerBody`."""
        return self.logprobs

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
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # variables of the model's template
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    return_prompt_text: bool | None = None

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

    @property
    def other_names(self) -> dict[str, str]:
        """See `AnswerBody`."""
        newer = {"max_tokens": "max_completion_tokens"}
        return {"logprobs": "top_logprobs"} | ({} if self.max_completion_tokens is None else newer)

    @property
    def role(self) -> str:
        """Who speaks in the answer."""
        return "assistant" if self.add_generation_prompt else str(self.messages[-1]["role"])

    @property
    def echoed(self) -> str:
        """The last message, where its speaker goes on; its parts in a line each."""
        if not self.echo or (last := self.messages[-1])["role"] != self.role:
            return ""
        content = last.get("content") or ""
        return content if isinstance(content, str) else "\n".join(p["text"] for p in content)

    def most_tokens(self) -> int | None:
        """Return OpenAI's newer name before the older one."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def prompts(self) -> list[Prompt]:
        """Return the conversation.

        Raises:
            HttpError: 400; it has a message that is none.
        """
        try:
            return [
                Chat(
                    self.messages,
                    add_generation_prompt=self.add_generation_prompt,
                    continue_final_message=self.continue_final_message,
                    chat_template_kwargs=self._variables(),
                )
            ]
        except ConfigError as error:
            raise HttpError(400, str(error), "messages") from error

    def _variables(self) -> dict[str, Any]:
        """Those of the template; an effort switches thinking on or off, as vLLM has it."""
        found = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            found["documents"] = self.documents
        if self.reasoning_effort is not None:
            found.setdefault("enable_thinking", self.reasoning_effort != "none")
            found["reasoning_effort"] = self.reasoning_effort
        return found

    def _echoed_logprobs(self) -> int | None:
        """See `AnswerBody`; no event of a stream tells them."""
        return None if self.stream else (self.top_logprobs or 0)


def _are_ids(prompt: list[Any]) -> bool:
    """Whether it may be token ids, as far as the first one tells; the engine looks at all."""
    return not prompt or isinstance(prompt[0], int)


def named_field(message: str) -> str | None:
    """Return the field of a body that a message begins with."""
    word = message.split(" ", 1)[0].rstrip(":,")
    known = CompletionBody.__struct_fields__, ChatBody.__struct_fields__
    return word if any(word in fields for fields in known) else None
