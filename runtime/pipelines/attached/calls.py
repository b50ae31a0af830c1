"""How a call of a model becomes inputs of an engine, and its outputs what the model returns.

What an engine does not take is refused by name: nothing that a pipeline passes is dropped.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import diffusers
import torch
import transformers
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.dtypes import Array

_STRENGTHS = ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")
_UNPACKED = ("added_cond_kwargs", "kwargs")  # mappings of further arguments
_PENULTIMATE = "hidden_state_2"


@dataclass(frozen=True)
class Call:
    """One call of a model."""

    inputs: Mapping[str, Any]  # of the engine: tensors or numbers, by name
    scale: float = 1.0  # of every strength
    return_dict: bool = True
    output_hidden_states: bool = False


def forward_of(manifest: Manifest) -> inspect.Signature:
    """Return how the model that an engine was built from is called.

    Raises:
        ConfigError: neither diffusers nor transformers has its class.
    """
    name = manifest.base_model.architecture
    for library in (diffusers, transformers):
        if kind := getattr(library, name, None):
            return inspect.signature(kind.forward)
    raise ConfigError(
        f"the engine is of {name or 'a graph by another exporter'}, which is no class of diffusers "
        "or transformers; build it with: build-engine --model PIPELINE"
    )


def read_call(
    forward: inspect.Signature, names: Collection[str], args: tuple[Any, ...], kwargs: Any
) -> Call:
    """Return a call's arguments as an engine's inputs.

    Args:
        forward: of the model.
        names: the engine's own inputs.
        args: of the call, without `self`.
        kwargs: of the call, by name.

    Raises:
        ConfigError: one is no input of the engine.
        TypeError: the model does not take the arguments.
    """
    inputs: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for name, value in _given(forward, args, kwargs):
        if name in ("return_dict", "output_hidden_states"):
            form[name] = bool(value)
        elif name in _STRENGTHS:
            form["scale"] = _only_scale(name, value)
        elif name in names:
            inputs[name] = value
        elif not _says_nothing(name, value):
            raise ConfigError(
                f"{name} is given, and is no input of the engine, which takes {listed([*names])}"
            )
    return Call(inputs, **form)


def _given(
    forward: inspect.Signature, args: tuple[Any, ...], kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """Every argument that is not None by its own name."""
    _, *bound = forward.bind(None, *args, **kwargs).arguments.items()
    for name, value in bound:
        inner = value.items() if name in _UNPACKED and value is not None else [(name, value)]
        yield from ((each, given) for each, given in inner if given is not None)


def _only_scale(name: str, given: Mapping[str, Any]) -> float:
    if others := given.keys() - {"scale"}:
        raise ConfigError(f"{name} has {listed(sorted(others))}; an engine takes 'scale' alone")
    return float(given.get("scale", 1.0))


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a model would do the same without an argument."""
    if name == "attention_mask" and isinstance(value, Tensor):
        return bool(value.all())
    return value is False


def arrays_of(call: Call, own: Collection[Binding]) -> dict[str, Array]:
    """Return a call's inputs as an engine takes them, in torch's memory where it can be.

    A number stands for every row [batch].

    Raises:
        ConfigError: one is missing.
    """
    if missing := [binding.name for binding in own if binding.name not in call.inputs]:
        raise ConfigError(f"the engine takes {listed(missing)}, which the call does not have")
    given = {name: torch.as_tensor(value).detach() for name, value in call.inputs.items()}
    sizes = {each.shape[0]: len(given[each.name]) for each in own if given[each.name].ndim}
    arrays = {}
    for binding in own:
        tensor = given[binding.name]
        if tensor.ndim == 0 and len(binding.shape) == 1:
            tensor = tensor.expand(sizes.get(binding.shape[0], 1))
        # Which numpy does not have; the engine's inputs are rounded to it again.
        dtype = "float32" if binding.dtype == "bfloat16" else binding.dtype
        arrays[binding.name] = tensor.to("cpu", getattr(torch, dtype)).numpy()
    return arrays


def tensors_of(arrays: Mapping[str, Array], outputs: Collection[Binding], device: Any) -> Any:
    """Return an engine's outputs as torch has them, by name."""
    return {
        binding.name: torch.from_numpy(arrays[binding.name]).to(
            device, getattr(torch, binding.dtype)
        )
        for binding in outputs
    }


@dataclass(frozen=True)
class _Penultimate:
    """The hidden states of a text encoder, of which an engine returns the last but one."""

    tensor: Tensor = field(repr=False)

    def __getitem__(self, index: int) -> Tensor:
        if index != -2:
            raise ConfigError(
                f"hidden_states[{index}] is none of the engine's outputs, which are those of the "
                "last layer and of the one before it, hidden_states[-2]; leave out clip_skip"
            )
        return self.tensor


class _NotBuilt:
    """The last layer's states, of an engine without that output; SDXL asks for `ndim` alone."""

    ndim = 3

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"last_hidden_state.{name}: the pipeline that the engine was built from reads other "
            "outputs of this text encoder; build it with: build-engine --model FOLDER_OF_ENCODER"
        )


def answer_of(call: Call, architecture: str, tensors: Mapping[str, Tensor]) -> Any:
    """Return outputs as the model would: an object of its kind, or a tuple.

    Args:
        call: which says whether hidden states are asked for, and a tuple.
        architecture: the model's class.
        tensors: by output.
    """
    if hasattr(diffusers, architecture):
        (sample,) = tensors.values()
        answer: Any = Transformer2DModelOutput(sample=sample)
    else:
        answer = _text_answer(call, architecture, tensors)
    return answer if call.return_dict else answer.to_tuple()


def _text_answer(call: Call, architecture: str, tensors: Mapping[str, Tensor]) -> Any:
    fields: dict[str, Any] = {"last_hidden_state": tensors.get("last_hidden_state", _NotBuilt())}
    if call.output_hidden_states and {*tensors} == {"last_hidden_state"}:
        raise ConfigError("the engine returns the last layer's states alone; leave out clip_skip")
    if call.output_hidden_states and _PENULTIMATE in tensors:
        fields["hidden_states"] = _Penultimate(tensors[_PENULTIMATE])
    if architecture == "CLIPTextModelWithProjection":
        return CLIPTextModelOutput(text_embeds=tensors["pooled"], **fields)
    return BaseModelOutputWithPooling(pooler_output=tensors.get("pooled"), **fields)
