"""`runtime/engines/tensorrt/run_key.py`: when two runs are one."""

from dataclasses import replace

from trt_lora.plugins.kernels.candidates import CandidateBuffers, LogitsShape
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState, TopKSearch, frozen_copy


def state_of(**addresses: int) -> RunState:
    """Return a state with tensors of shape [1] at these addresses."""
    state = RunState()
    for name, pointer in addresses.items():
        state.put(name, (pointer, (1,)))
    return state


def test_runs_are_equal_however_they_came_about() -> None:
    state = state_of(a=3, b=1, c=2)
    for name, pointer in (("a", 9), ("b", 4), ("a", 1), ("b", 2), ("c", 3)):
        state.put(name, (pointer, (1,)))
    direct = state_of(c=3, b=2, a=1).key(0)

    assert state.key(0) == direct
    assert {frozen_copy(direct): "found"}[state.key(0)] == "found"


def test_runs_differ_by_profile_address_shape_and_name() -> None:
    key = state_of(a=1, b=2).key(0)
    shape = state_of(a=1)
    shape.put("b", (2, (2,)))
    swapped = state_of(a=2, b=1)

    others = [state_of(a=1, b=2).key(1), shape.key(0), swapped.key(0), state_of(a=1).key(0)]
    assert all(key != other for other in others)
    assert len({key, *others}) == 5


def test_runs_differ_by_the_search_that_follows_them() -> None:
    """A graph of another run would search where memory may have been freed."""
    plain = state_of(a=1).key(0)
    shape, buffers = LogitsShape(1, 11, "float32"), CandidateBuffers(2, 3, 4, 5, 6, 7, 8)
    searched = replace(plain, search=TopKSearch(shape, buffers))
    moved = replace(plain, search=TopKSearch(shape, buffers._replace(tokens=9)))

    assert len({plain, searched, moved, frozen_copy(searched)}) == 3


def test_keys_with_the_same_digest_are_different_if_any_place_is() -> None:
    one, other = (RunKey(0, {"a": (pointer, (1,))}, digest=7) for pointer in (1, 2))

    assert hash(one) == hash(other)
    assert one != other
    assert len({one: 1, other: 2}) == 2


def test_a_key_changes_with_its_run_unless_it_is_kept() -> None:
    state = state_of(a=1)
    live, copy = state.key(0), frozen_copy(state.key(0))
    state.put("a", (2, (1,)))

    assert live.addresses["a"] == (2, (1,))
    assert copy.addresses["a"] == (1, (1,))
