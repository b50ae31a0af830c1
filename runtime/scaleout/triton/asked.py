"""Asked: what a request's inputs and parameters ask for, in the words of three clients.

Ours, those of vLLM's backend, and those of TensorRT-LLM's, which has each sampling parameter as an
input of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.interfaces.trtllm import TrtllmLoraRequest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.server.answers.sampling_json import read_object

Inputs = Mapping[str, Array]  # by name; with a dimension of 1 before the others, or without


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: str | list[int]
    sampling: Mapping[str, Any]  # vLLM's fields
    adapter: str | None  # by name; None is the base model, or what the task says
    task: TrtllmLoraRequest
    streams: bool  # responses as tokens come
    prepends: bool  # the prompt, before the answer


def read_asked(inputs: Inputs, parameters: str) -> Asked:
    """Return what a request asks for.

    Args:
        inputs: its tensors.
        parameters: of the request, an object of JSON: what `/generate` is given beside the inputs.
            `sampling_parameters` goes before it, and an input before both.

    Raises:
        ConfigError: an input has another shape or is no text; there is no prompt or two; two
            adapters are named.
        AdapterError: weights came without a config, or without an id.
    """
    sampling = read_object(parameters, "the request's parameters") if parameters else {}
    sampling |= read_object(_text(inputs, "sampling_parameters") or "{}", "sampling_parameters")
    for name, read in _READERS.items():
        if name in inputs:
            sampling |= read(inputs, name)
    named = sampling.pop("lora_name", None)
    adapter, task = _text(inputs, "lora_name") or named or None, _task(inputs)
    if adapter is not None and (task.lora_task_id is not None or not isinstance(adapter, str)):
        raise ConfigError(
            f"lora_name is {shown(adapter)} and lora_task_id is {task.lora_task_id}, expected the "
            "name of one adapter, or one task"
        )
    streams, excludes = (_one(inputs, name) for name in ("stream", "exclude_input_in_output"))
    prompt = _prompt(inputs)
    prepends = excludes is not None and not excludes
    if prepends and (streams or not isinstance(prompt, str)):
        raise ConfigError("exclude_input_in_output is false, but the answer is no whole text")
    return Asked(prompt, sampling, adapter, task, bool(streams), prepends)


def _prompt(inputs: Inputs) -> str | list[int]:
    text, ids = _text(inputs, "text_input"), inputs.get("input_ids")
    if (text is None) == (ids is None):
        raise ConfigError("a prompt is text_input or input_ids; send one of them")
    if ids is None:
        return str(text)
    found: list[int] = _flat(inputs, "input_ids").tolist()
    return found


def _task(inputs: Inputs) -> TrtllmLoraRequest:
    arrays = (inputs.get(name) for name in ("lora_weights", "lora_config"))
    return TrtllmLoraRequest(_one(inputs, "lora_task_id"), *arrays)


def _flat(inputs: Inputs, name: str) -> Array:
    """The values of one request, not of a batch."""
    array = inputs[name]
    if array.ndim > 1 and array.shape[:-1] != (1,) * (array.ndim - 1):
        raise ConfigError(f"{name} has shape {list(array.shape)}, expected those of one request")
    return array.ravel()


def _one(inputs: Inputs, name: str) -> Any:
    if name not in inputs:
        return None
    array = _flat(inputs, name)
    if array.size != 1:
        raise ConfigError(f"{name} has shape {list(array.shape)}, expected one value")
    return array.item()


def _text(inputs: Inputs, name: str) -> str | None:
    value = _one(inputs, name)
    return None if value is None else _decoded(name, value)


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is {shown(value)}, expected text in UTF-8") from error


Read = Callable[[Inputs, str], dict[str, Any]]  # fields of vLLM's from an input of a name


def _as(field: str) -> Read:
    return lambda inputs, name: {field: _one(inputs, name)}


def _words(field: str) -> Read:
    """Strings; TensorRT-LLM's own clients send an empty one for none."""

    def read(inputs: Inputs, name: str) -> dict[str, Any]:
        words = [_decoded(name, word) for word in _flat(inputs, name).tolist()]
        return {field: [word for word in words if word] or None}

    return read


def _top_p(inputs: Inputs, name: str) -> dict[str, Any]:
    """0 is TensorRT-LLM's way to leave it out."""
    return {"top_p": _one(inputs, name) or None}


def _logprobs(inputs: Inputs, name: str) -> dict[str, Any]:
    """That of the chosen token, which `logprobs` may ask more of."""
    return {"logprobs": 0} if _one(inputs, name) else {}


def _end(inputs: Inputs, name: str) -> dict[str, Any]:
    return {"stop_token_ids": [_one(inputs, name)]}


def _beams(inputs: Inputs, name: str) -> dict[str, Any]:
    if (width := _one(inputs, name)) != 1:
        raise ConfigError(f"{name} is {width}, expected 1: no beams are searched")
    return {}


def _nothing(inputs: Inputs, name: str) -> dict[str, Any]:
    """What has no meaning where there is one beam, and nothing is padded."""
    return {}


_READERS: Mapping[str, Read] = {
    "max_tokens": _as("max_tokens"),
    "temperature": _as("temperature"),
    "top_k": _as("top_k"),
    "top_p": _top_p,
    "repetition_penalty": _as("repetition_penalty"),
    "presence_penalty": _as("presence_penalty"),
    "frequency_penalty": _as("frequency_penalty"),
    "min_length": _as("min_tokens"),
    "random_seed": _as("seed"),
    "stop_words": _words("stop"),
    "bad_words": _words("bad_words"),
    "end_id": _end,
    "return_log_probs": _logprobs,
    "beam_width": _beams,
    "pad_id": _nothing,
    "length_penalty": _nothing,
}
