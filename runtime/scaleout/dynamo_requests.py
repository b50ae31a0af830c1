"""Requests as Dynamo's front end sends them: every field is honoured, or refused by its name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.server.answers.structures import structure
from trt_lora.runtime.server.errors import HttpError

_OPTIONS = ("sampling_options", "stop_conditions", "output_options")
_OURS = frozenset(field.name for field in fields(SamplingParams))
_ALL_TOKENS = (1 << 32) - 1  # how the front end says -1 for log probabilities
# Of the text, which the front end makes of the tokens.
_OF_TEXT = frozenset(
    {
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
        *("include_stop_str_in_output", "no_stop_trim"),
        *("formatted_prompt", "return_tokens_as_token_ids"),
    }
)
# Stop tokens, which the front end shows in the text or does not.
_STOP_TOKENS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# Values that ask for nothing, of what is not done here.
_OFF: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words_token_ids": ([],),
}
# What a request may bring that no engine here takes.
_UNKNOWN_INPUTS = (
    *("prompt_embeds", "multi_modal_data", "mm_processor_kwargs", "encoder_result"),
    *("prefill_result", "bootstrap_info", "require_reasoning"),
)


@dataclass(frozen=True)
class TokenRequest:
    """A prompt in tokens, and how it is answered."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    model: str  # that was asked for; empty in a probe
    salt: str | None  # prefixes are shared among requests with the same one
    visible_stops: frozenset[int]  # stop tokens that come as tokens, too


def token_request(request: Mapping[str, Any], defaults: SamplingParams) -> TokenRequest:
    """Return what a request asks for.

    Args:
        request: as `LLMEngine.generate` is given it, with a list of tokens.
        defaults: of the model, for fields that are not given.

    Raises:
        ConfigError: a field asks for what is not done here, or its value has no meaning.
    """
    for name in _UNKNOWN_INPUTS:
        if request.get(name):
            raise ConfigError(f"{name} is given, and this engine takes tokens alone; leave it out")
    asked = _asked(request)
    visible = frozenset(asked.get("stop_token_ids_visible", ()))
    routing = request.get("routing") or {}
    return TokenRequest(
        prompt=tuple(request["token_ids"]),
        sampling=replace(defaults, **_sampling(asked)),
        model=routing.get("lora_name") or request.get("model") or "",
        salt=routing.get("cache_salt"),
        visible_stops=visible,
    )


def _asked(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for in all groups of options, and in what the front end only passes on."""
    passed = dict(request.get("extra_args") or {})
    passed.pop("nvext", None)  # again what the front end has understood
    groups = [request.get(name) for name in _OPTIONS] + [passed.pop(name, 0) for name in _OPTIONS]
    groups.append(passed)
    return {
        name: value
        for group in groups
        for name, value in (group or {}).items()
        if value is not None and name not in _OF_TEXT
    }


def _sampling(asked: dict[str, Any]) -> dict[str, Any]:
    """Our fields for what is asked."""
    given = {name: value for name, value in asked.items() if name in _OURS}
    stops = [token for name in _STOP_TOKENS for token in asked.get(name, ())]
    given |= {"stop_token_ids": stops, "max_tokens": asked.get("max_tokens")}
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) == _ALL_TOKENS:
            given[name] = -1
    if given.get("logprob_token_ids"):
        given["logprobs"] = None  # these tokens, and not so many
    if (guide := asked.get("guided_decoding")) is not None:
        given["structured_outputs"] = _guided(guide)
    _check_rest(asked, given.get("n", 1))
    # The front end makes the text; here it is looked at for stop strings alone.
    return given | {"detokenize": bool(given.get("stop"))}


def _guided(guide: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What an answer has to be; which library shall see to it is no matter."""
    try:
        return structure(None, {name: guide[name] for name in guide if name != "backend"})
    except HttpError as error:
        raise ConfigError(f"guided_decoding: {error}") from error


def _check_rest(asked: Mapping[str, Any], n: int) -> None:
    """Refuse what is not among our fields, unless it asks for nothing."""
    known = _OURS | {*_STOP_TOKENS, "guided_decoding"}
    off = {**_OFF, "best_of": (1, n)}
    for name, value in asked.items():
        if name not in known and value not in off.get(name, ()):
            raise ConfigError(f"{name} is {shown(value)}, which is not done here; leave it out")
