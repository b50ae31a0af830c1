"""Nobody starves: how long a request is passed over is bounded, and slots go on being used."""

import numpy as np
import pytest
from support.policy_steps import DRAIN_AFTER, LONGEST, PolicySteps

from trt_lora.plugins.errors import StateError

PLACING = 1  # a step between the slot that comes free and the request that joins


@pytest.mark.parametrize("on_host", ["", "AB"], ids=["from disk", "on the host"])
def test_one_slot_is_drained_for_who_was_passed_over(on_host: str) -> None:
    served = PolicySteps()
    served.cache.host |= set(on_host)
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    for _ in range(40):
        served.submit("A", tokens=LONGEST)
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING
    assert max(served.waits.values()) <= 2 * (DRAIN_AFTER + LONGEST + PLACING)


def test_a_slot_that_was_held_for_a_copy_is_not_held_for_ever() -> None:
    served = PolicySteps(rows=1)
    served.cache.host |= {"A", "B"}
    served.submit("A", "A")
    served.step(2)
    other = served.submit("B")
    for _ in range(60):
        served.submit("A")
        served.step()
    assert served.waits[other] <= 3 * LONGEST  # the two that are older go first


def test_without_draining_it_would_starve() -> None:
    served = PolicySteps(max_wait_steps=1000)
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    for _ in range(100):
        served.submit("A", tokens=LONGEST)
        served.step()
    assert other not in served.waits


@pytest.mark.parametrize("more", ["A", "ABCDE"])
def test_several_that_starve_are_served_in_turn_each_within_a_longest_answer(more: str) -> None:
    served = PolicySteps("ABCDE", rows=1000)
    served.submit("A")
    served.step(2)
    others = [served.submit(name) for name in "BCDE"]
    for _ in range(120):
        served.submit(*more)
        served.step()
    waits = [served.waits[number] for number in others]
    assert waits == sorted(waits)
    for turn, wait in enumerate(waits, 1):
        assert wait <= DRAIN_AFTER + turn * (
            LONGEST + PLACING + 1
        )  # all that wait join, then drain


def test_as_many_slots_are_drained_as_adapters_starve_and_no_more() -> None:
    served = PolicySteps(slots=3, rows=64)
    served.submit("A", "B", "C")
    served.step(3)
    other = served.submit("D")
    joined = []
    for _ in range(DRAIN_AFTER + LONGEST + 5):
        served.submit("A", "B", "C", tokens=3)
        joined.append({s.adapter for s in served.step().joined})
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING
    draining = joined[DRAIN_AFTER + 1]
    assert len(draining) == 2
    assert draining < {"A", "B", "C"}


def test_who_takes_a_slot_takes_in_all_that_wait_for_it() -> None:
    served = PolicySteps()
    served.submit("A")
    served.step(2)
    others = [served.submit("B") for _ in range(3)]
    for _ in range(40):
        served.submit("A")
        served.step()
    assert len({served.submitted[number] + served.waits[number] for number in others}) == 1


def test_no_more_slots_are_held_than_rows_are_free() -> None:
    served = PolicySteps("ABCD", slots=4, rows=3, is_instant=False)
    served.cache.host |= set("ABCD")
    served.submit(None)
    served.submit(*"ABCD")
    served.step()
    assert {lease.name for lease in served.cache.leases} == {"A", "B"}


def test_half_of_the_running_adapters_go_on() -> None:
    served = PolicySteps("ABCDEFGH", slots=4, rows=64)
    served.submit(*"ABCD")
    served.step(3)
    served.submit(*"EFGH")
    served.step(DRAIN_AFTER + 1)
    served.submit(*"ABCD")
    joined = served.step().joined
    assert len({sequence.adapter for sequence in joined} & set("ABCD")) == 2


def test_an_adapter_in_a_slot_that_others_hold_all_of_starves_no_more_than_any() -> None:
    served = PolicySteps("ADX", slots=2)
    served.submit("D", tokens=1)
    served.step(3)
    served.submit("A")
    served.step(2)
    served.cache.host.add("X")
    served.cache.lease("X")  # by somebody else, who has not used it yet
    assert served.cache.bindings.resident == {"A", "D"}
    number = served.submit("D")
    for _ in range(40):
        served.submit("A")
        served.step()
    assert served.waits[number] <= DRAIN_AFTER + LONGEST + PLACING


def test_memory_of_the_host_is_waited_for_as_a_slot_is() -> None:
    served = PolicySteps("AB", slots=2)
    served.submit("A")
    served.step(2)
    served.cache.errors["B"] = StateError("host memory is full")
    other = served.submit("B")
    for _ in range(40):
        served.submit("A")
        if ("A", 1) not in served.cache.held:  # it leaves the host for B
            served.cache.errors.clear()
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + 2 * PLACING


def test_who_takes_a_slot_late_is_drained_as_soon_as_it_runs() -> None:
    served = PolicySteps("AB", rows=1)
    served.cache.host |= {"A", "B"}
    served.submit(None, tokens=DRAIN_AFTER + 4)
    served.submit("A", tokens=3)  # its slot is held from now on, while it waits for the row
    other = served.submit("B")
    for _ in range(40):
        served.submit("A")
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + 4 + 3 + PLACING + 1


def test_the_adapter_that_ends_first_is_drained() -> None:
    served = PolicySteps(slots=2)
    served.submit("A", tokens=100)
    served.submit("B", tokens=10)
    served.step(2)
    served.submit("C")
    for _ in range(20):
        served.submit("A", "B", tokens=4)
        served.step()
    assert "C" in {served.sequences[number].adapter for number in served.waits}


def test_who_is_drained_stays_so_whatever_ends_sooner_meanwhile() -> None:
    served = PolicySteps(slots=2, rows=64)
    served.submit("A", tokens=30)
    served.submit("B", tokens=50)
    served.step(2)
    other = served.submit("C")
    for _ in range(60):
        served.submit("B", tokens=1)
        served.submit("A", tokens=30)
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + 30 + PLACING


def test_a_drain_ends_when_who_waited_is_cancelled() -> None:
    served = PolicySteps()
    served.submit("A")
    served.step(2)
    other = served.submit("B")
    served.step(DRAIN_AFTER + 1)
    number = served.submit("A")
    served.step(2)
    assert number not in served.waits
    served.end(other)
    served.step(2)
    assert served.waits[number] == 3


def test_preemption_lengthens_no_wait() -> None:
    served = PolicySteps()
    first = served.submit("A")
    served.step(2)
    other = served.submit("B")
    served.step(DRAIN_AFTER + 2)
    served.preempt(first)
    served.submit("A")
    served.step()
    assert list(served.left) == [first]  # older than B: it goes on
    for _ in range(40):
        served.submit("A")
        served.step()
    assert served.waits[other] <= DRAIN_AFTER + LONGEST + PLACING


def test_popular_adapters_keep_nobody_waiting_for_ever() -> None:
    """200 adapters by Zipf's law over 8 slots, at four fifths of what they can serve."""
    rng = np.random.default_rng(0)
    names = [f"a{i}" for i in range(200)]
    shares = 1 / np.arange(1, 201)
    served = PolicySteps(names, slots=8, rows=64, max_wait_steps=32)
    for _ in range(1500):
        for name in rng.choice(names, rng.poisson(0.4), p=shares / shares.sum()):
            served.submit(str(name), tokens=32)
        served.step()
    passed = [served.policy.steps - served.submitted[n] for n in range(served.next)]
    waits = [served.waits.get(number, passed[number]) for number in range(served.next)]
    assert len(waits) > 500
    assert np.percentile(waits, 99) < 32 + 8 * 32
    assert np.percentile(waits, 50) < 32 + 4 * 32
