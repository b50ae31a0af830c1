"""LoRAManager: names and numbers of any type are taken, or refused by a message."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import A, B, manager_with, pair, refreshed, state_of

from trt_lora.plugins.errors import AdapterError, ConfigError, UnknownAdapterError
from trt_lora.runtime.interfaces.edgellm import LoRAManager

NO_STRINGS = [None, 1, 1.5, True, b"x", Path("x"), ["x"], {"x": 1}, object()]
NO_NUMBERS = [None, "0.5", b"1", True, np.bool_(True), 1j, Decimal(1), [0.5], np.ones(1)]

Call = Callable[[LoRAManager, Any], object]
NEW: dict[str, Call] = {
    "add_weights": lambda manager, name: manager.add_weights(name, pair()),
    "blend": lambda manager, name: manager.blend(name, {"a": 1.0}),
    "load_weights": lambda manager, name: manager.load_weights(name, "adapter.safetensors"),
}
KNOWN: dict[str, Call] = {
    "switch_weights": lambda manager, name: manager.switch_weights(name),
    "switch_weights, scaled": lambda manager, name: manager.switch_weights(name, 0.5),
    "unload": lambda manager, name: manager.unload(name),
    "get_coverage": lambda manager, name: manager.get_coverage(name),
}
SCALED: dict[str, Call] = {
    "switch_weights": lambda manager, scale: manager.switch_weights("a", scale),
    "blend": lambda manager, scale: manager.blend("b", {"a": scale}),
}


def refused(call: Call, value: object, *messages: str, bound: bool = True) -> None:
    """Refused with the messages, in one line that is not long, and the manager is as before."""
    manager = manager_with(bound, a=pair())
    manager.switch_weights("a", scale=2)
    ask = state_of if bound else LoRAManager.get_active_adapter_name
    before = ask(manager), manager.active_scale
    with pytest.raises((AdapterError, ConfigError, UnknownAdapterError)) as caught:
        call(manager, value)
    text = str(caught.value)
    assert [message for message in messages if message not in text] == []
    assert len(text) < 1000
    assert "\n" not in text
    text.encode()
    assert (ask(manager), manager.active_scale) == before


@pytest.mark.parametrize("call", (NEW | KNOWN).values(), ids=(NEW | KNOWN).keys())
@pytest.mark.parametrize("name", NO_STRINGS, ids=lambda name: type(name).__name__)
def test_a_name_that_is_no_string_is_refused(call: Call, name: object) -> None:
    refused(call, name, "name is ", f"({type(name).__name__}), expected str")


@pytest.mark.parametrize("call", NEW.values(), ids=NEW.keys())
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the empty one means the base model"),
        ("\udc80", r"Unicode text, got '\udc80'"),
        ("x" * 1025, "at most 1024 characters, got 1025"),
        ("x" * 10**7, "at most 1024 characters, got 10000000"),
    ],
    ids=["empty", "surrogate", "long", "huge"],
)
def test_a_name_that_cannot_be_written_is_refused(call: Call, name: str, message: str) -> None:
    refused(call, name, message)


@pytest.mark.parametrize("name", ["x", " ", "\n", "päpstlich 鸡", "x" * 1024, np.str_("x")])
def test_any_other_string_is_a_name(name: str, tmp_path: Path) -> None:
    save_file(pair(), tmp_path / "a.safetensors")
    manager = manager_with(a=pair())
    manager.load_weights(name, tmp_path / "a.safetensors")
    manager.switch_weights(name)
    assert manager.get_active_adapter_name() == name
    manager.unload(name, force=True)
    assert manager.get_adapter_names() == ["a"]


@pytest.mark.parametrize("call", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.parametrize("name", ["", "b", "\udc80", "x" * 10**7], ids=["", "b", "sur", "huge"])
def test_a_string_that_names_no_adapter_is_an_unknown_adapter(call: Call, name: str) -> None:
    refused(call, name, "unknown adapter '", "'; loaded: a")


@pytest.mark.parametrize("call", SCALED.values(), ids=SCALED.keys())
@pytest.mark.parametrize("scale", NO_NUMBERS, ids=lambda scale: type(scale).__name__)
def test_a_scale_that_is_no_number_is_refused(call: Call, scale: object) -> None:
    refused(call, scale, "scale is ", f"({type(scale).__name__})")


@pytest.mark.parametrize("call", SCALED.values(), ids=SCALED.keys())
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (math.inf, "inf"),
        (np.float32("nan"), "nan"),
        (10**400, "inf"),
        (-(10**400), "inf"),
    ],
    ids=["nan", "-inf", "inf", "float32", "huge", "-huge"],
)
def test_a_scale_that_is_not_finite_is_refused(
    call: Call, scale: object, told: str, bound: bool
) -> None:
    message = f"adapter 'a': a scale is {told}, expected a finite number"
    refused(call, scale, message, bound=bound)


@pytest.mark.parametrize(
    "scale", [3, 3.0, np.float16(3), np.float32(3), np.float64(3), np.int8(3), Fraction(3)]
)
def test_a_scale_may_be_any_real_number(scale: Any) -> None:
    manager = manager_with(a=pair())
    manager.blend("b", {"a": scale})
    for name, scaled in (("a", scale), ("b", 1)):
        manager.switch_weights(name, scaled)
        np.testing.assert_array_equal(refreshed(manager)[B].numpy(), np.full((2, 6), 3))
        assert type(manager.active_scale) is float


@pytest.mark.parametrize("binding", [None, 1, b"lora_A", ("lora", "A"), Path(A)])
@pytest.mark.parametrize("bound", [True, False])
def test_a_binding_whose_name_is_no_string_is_refused(bound: bool, binding: Any) -> None:
    manager = manager_with(bound)
    with pytest.raises(AdapterError, match=r"the name of a binding is a string, got .*\(\w+\)$"):
        manager.add_weights("a", {**pair(), binding: pair()[A]})
    assert manager.get_adapter_names() == []
