"""Every public function refuses arguments of a wrong type by name, before it does anything."""

import enum
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import trt_lora.builder as builder
import trt_lora.runtime as runtime
from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.interfaces import max, trtllm, vllm

PACKAGES = (runtime, builder, max, trtllm, vllm)
# Values that are looked at where they are used.
RECORDS = {
    *("Adapter", "Completion", "CompletionOutput", "Coverage", "LoRALayerWeights"),
    *("LoRAModel", "LoRAMapping", "LoRAOutcome", "Manifest", "PEFTHelper"),
    *("RequestOutput", "StepAnswers", "Tensor", "Token", "TokenLogprob"),
}
NEEDED: dict[str, dict[str, object]] = {  # fields of what cannot be made without them
    "BuildConfig": {"model": Path("model"), "output": Path("engine")},
    "GraphConfig": {"onnx": Path("model.onnx"), "output": Path("engine")},
    "PipelineConfig": {"graph": builder.GraphConfig(Path("sdxl"), Path("engines"), ("to_q",))},
    "Chat": {"messages": [{"role": "user", "content": "x"}]},
    "LoRARequest": {"lora_name": "a", "lora_int_id": 1},
}

Call = tuple[str, Callable[..., object], str]


class Wrong:
    """Nothing that anything here takes."""


def calls() -> Iterator[Call]:
    """Every argument of each public function, method and constructor."""
    for package in PACKAGES:
        for name in package.__all__:
            found = getattr(package, name)
            where = f"{package.__name__}.{name}"
            if inspect.isfunction(found):
                yield from arguments(where, found, found)
            elif inspect.isclass(found) and not has_no_calls(found):
                yield from calls_of_class(where, found)


def has_no_calls(cls: type) -> bool:
    return getattr(cls, "_is_protocol", False) or issubclass(cls, enum.Enum | Exception | dict)


def calls_of_class(where: str, cls: type) -> Iterator[Call]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("trt_lora.")]
    for method in dict.fromkeys(n for base in own for n in vars(base) if not n.startswith("_")):
        static = inspect.getattr_static(cls, method)
        if isinstance(static, classmethod | staticmethod):
            yield from arguments(f"{where}.{method}", getattr(cls, method), static.__func__)
        elif inspect.isfunction(static):
            yield from arguments(f"{where}.{method}", partial(static, None), static)
    if cls.__name__ not in RECORDS:
        made = partial(cls, **NEEDED.get(cls.__name__, {}))
        hinted = cls if is_dataclass(cls) else cls.__init__  # type: ignore[misc]
        yield from arguments(where, made, hinted)


def arguments(where: str, call: Callable[..., object], hinted: Any) -> Iterator[Call]:
    hints = get_type_hints(hinted)
    for name in inspect.signature(call).parameters:
        if name in hints and hints[name] not in (Any, object):
            yield f"{where}({name})", call, name


CALLS = list(calls())


def test_every_public_function_is_called() -> None:
    assert len(CALLS) > 200


@pytest.mark.parametrize(
    ("call", "argument"), [c[1:] for c in CALLS], ids=[where for where, *_ in CALLS]
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(
    call: Callable[..., object], argument: str
) -> None:
    with pytest.raises(LoRAError, match=argument):
        call(**{argument: Wrong()})
