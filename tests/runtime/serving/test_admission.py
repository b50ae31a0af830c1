"""Who joins at a step: within rows and slots, nobody blocked, nobody harmed by another's load."""

import pytest
from support.policy_steps import DRAIN_AFTER, LONGEST, PolicySteps

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.serving.serving_config import ServingConfig


def test_requests_join_when_their_adapter_lies_in_a_slot_and_older_ones_first() -> None:
    served = PolicySteps(slots=2, rows=2)
    served.submit("A", "B", "A")
    assert served.step().joined == []  # loads have begun
    assert served.joined() == [0, 1]
    assert served.policy.waiting == 1
    served.end(1)
    assert served.joined() == [2]


def test_a_request_whose_adapter_does_not_fit_is_passed_over() -> None:
    served = PolicySteps()
    served.submit("A")
    served.step(3)
    served.submit("B", "A", None)
    served.step()
    assert served.running() == ["A", "A", None]


def test_base_rows_need_no_slot() -> None:
    served = PolicySteps("ABC", slots=3)
    served.submit("A", "B", None, "C", None)
    served.step(3)
    assert sorted(map(str, served.running())) == ["A", "B", "C", "None", "None"]


def test_adapters_in_slots_go_before_older_requests_of_others() -> None:
    served = PolicySteps(slots=2, rows=2)
    served.submit("A", tokens=1)
    served.step(4)
    assert served.cache.bindings.resident == {"A"}
    served.submit("B")
    served.submit("A")
    served.step()
    assert served.running() == ["A"]
    served.step(2)
    assert served.running() == ["A", "B"]


def test_a_slot_that_another_thread_frees_is_found() -> None:
    served = PolicySteps("ABC", slots=2)
    served.cache.pins.add(("A", 1))
    served.submit("C", tokens=100)
    served.step(2)
    number = served.submit("B")
    served.step(3 * DRAIN_AFTER)
    assert number not in served.waits
    served.cache.pins.clear()
    served.step(10)
    assert number in served.waits


def test_the_cache_is_asked_nothing_while_nothing_changes() -> None:
    served = PolicySteps("AB", max_wait_steps=100)
    served.submit("A")
    served.step(2)
    served.submit("B")
    served.step(3)
    asked = served.cache.asked
    served.step(3)
    assert served.cache.asked == asked


def test_adapters_are_read_while_all_rows_are_in_use() -> None:
    served = PolicySteps("A", rows=1, is_instant=False)
    served.submit(None, "A")
    served.step()
    assert [name for name, _ in served.cache.pending] == ["A"]


def test_a_preempted_request_goes_back_to_the_front_with_its_tokens() -> None:
    served = PolicySteps(rows=1)
    first = served.submit("A", tokens=LONGEST)
    served.step(4)
    served.submit("A")
    served.preempt(first)
    (running,) = served.step().joined
    assert running.id == first
    assert running.tokens[:3] == (1, 7, 7)


def test_half_an_answer_is_not_ended_by_another_adapter_of_that_name() -> None:
    served = PolicySteps()
    first, second = served.submit("A"), served.submit("A")
    served.step(3)
    served.sequences[second].answer.clear()  # nothing of it is there
    for number in (first, second):
        served.preempt(number)
    served.cache.versions["A"] = 2
    served.cache.host.discard("A")
    served.step(3)
    assert "version 2, not 1" in str(served.failed.pop(first))
    assert not served.failed
    assert list(served.left) == [second]


def test_an_adapter_that_fails_on_its_way_to_a_slot_leaves_the_slot_to_others() -> None:
    served = PolicySteps(slots=1, is_instant=False)
    served.cache.host.add("A")
    number = served.submit("A")
    served.step()
    assert [lease.name for lease in served.cache.leases] == ["A"]  # the slot is held for it
    served.cache.host.discard("A")
    served.cache.errors["A"] = AdapterError("the file is gone")
    served.cache.end_loads("A")
    served.step()
    assert "the file is gone" in str(served.failed.pop(number))
    assert not served.cache.leases
    served.cache.host.add("B")
    served.submit("B")
    served.step()
    served.cache.end_loads("B")
    served.step()
    assert served.running() == ["B"]


def test_no_step_waits_for_a_load() -> None:
    served = PolicySteps(slots=2, is_instant=False)
    served.submit("A", "B")
    served.step(10)
    assert served.running() == []
    served.cache.end_loads("B")
    served.step()
    assert served.running() == ["B"]  # though A is older
    served.cache.end_loads("A")
    served.step(2)
    assert served.running() == ["B", "A"]


def test_a_slot_is_held_while_an_adapter_is_copied_there() -> None:
    served = PolicySteps("AB", is_instant=False)
    served.cache.host |= {"A", "B"}
    served.submit("A")
    served.step()
    assert {lease.name for lease in served.cache.leases} == {"A"}
    served.submit("B")
    served.step(3)
    assert [name for name, _ in served.cache.pending] == ["A"]
    served.cache.end_loads()
    served.step()
    assert served.running() == ["A"]


def test_a_slot_that_nobody_waits_for_any_more_is_given_back() -> None:
    served = PolicySteps("AB", is_instant=False)
    served.cache.host |= {"A", "B"}
    first = served.submit("A")
    served.step()
    served.end(first)
    assert not served.cache.leases
    served.submit("B")
    served.step()
    assert {lease.name for lease in served.cache.leases} == {"B"}


def test_a_slot_held_for_what_is_replaced_is_given_back() -> None:
    served = PolicySteps("A", is_instant=False)
    served.cache.host |= {"A"}
    served.submit("A")
    served.step()
    served.cache.versions["A"] = 2
    served.cache.end_loads()
    served.step()
    assert {lease.version for lease in served.cache.leases} == {2}
    served.cache.end_loads()
    served.step()
    assert served.running() == ["A"]


def test_a_load_that_fails_ends_those_who_waited_for_it_and_nobody_else() -> None:
    served = PolicySteps("AB", slots=2)
    served.cache.errors["A"] = AdapterError("damaged")
    served.submit("A", "B", "A")
    served.step(3)
    assert {number: str(error) for number, error in served.failed.items()} == {
        0: "damaged",
        2: "damaged",
    }
    assert served.running() == ["B"]


def test_an_adapter_that_is_unloaded_ends_the_requests_that_wait_for_it() -> None:
    served = PolicySteps("AB")
    first = served.submit("A")
    served.step(2)
    second = served.submit("A")
    other = served.submit("B")
    del served.cache.versions["A"]
    served.step()
    assert isinstance(served.failed[second], UnknownAdapterError)
    assert first in served.left  # it keeps what it has
    served.step(LONGEST + 2)
    assert other in served.left


def test_what_finds_no_room_on_the_host_is_tried_again_after_others_have_ended() -> None:
    served = PolicySteps("AB", slots=2)
    served.submit("A", tokens=6)
    served.step(2)
    served.cache.errors["B"] = StateError("host memory is full")
    number = served.submit("B")
    served.step(3)
    assert served.cache.loads["B"] == 0
    del served.cache.errors["B"]
    served.step(5)
    assert number in served.left


def test_what_never_finds_room_on_the_host_fails() -> None:
    served = PolicySteps("AB", slots=2)
    served.submit(None, tokens=100)  # it holds no memory of adapters
    served.submit("A", tokens=6)
    served.step(2)
    served.cache.errors["B"] = StateError("larger than the host memory")
    number = served.submit("B")
    served.step(3)
    assert not served.failed
    served.step(6)
    assert str(served.failed[number]) == "larger than the host memory"


def test_an_unknown_adapter_is_refused_at_once() -> None:
    served = PolicySteps()
    with pytest.raises(UnknownAdapterError):
        served.submit("X")
    assert served.policy.waiting == 0


def test_who_is_nowhere_cannot_end() -> None:
    served = PolicySteps()
    number = served.submit("A", tokens=1)
    served.step(3)
    with pytest.raises(StateError, match="request 0 does not run"):
        served.policy.end(served.sequences[number])


def test_few_adapters_are_read_ahead_of_their_turn() -> None:
    names = [f"a{i}" for i in range(50)]
    served = PolicySteps(names, slots=2, is_instant=False)
    served.submit(*names)
    served.step(5)
    assert [name for name, _ in served.cache.pending] == names[: ServingConfig.prefetch_depth]


def test_who_is_loaded_slowly_does_not_hold_up_who_is_there() -> None:
    names = [f"a{i}" for i in range(9)]
    served = PolicySteps(names, slots=2, is_instant=False)
    served.cache.host.add("a8")
    number = served.submit(*names)
    served.step()
    served.cache.end_loads("a8")
    served.step()
    assert list(served.left) == [number]


def test_numbers_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_wait_steps is -1, expected a number from 0 on"):
        ServingConfig(max_wait_steps=-1)
    with pytest.raises(ConfigError, match="prefetch_depth is 0"):
        ServingConfig(prefetch_depth=0)


def test_who_can_never_have_a_slot_fails_at_once_by_name() -> None:
    served = PolicySteps("ABC", slots=2)
    served.cache.pins |= {("A", 1), ("B", 1)}
    with pytest.raises(StateError, match=r"'C' can have no slot: 'A', 'B' are pinned in all 2"):
        served.submit("C")
    served.submit("A")  # it has one
    served.cache.pins.clear()
    number = served.submit("C")
    served.cache.pins |= {("A", 1), ("B", 1)}  # pinned since it waits
    served.step(3)
    assert "'C' can have no slot" in str(served.failed[number])


def test_clients_share_rows_and_a_flood_delays_no_other_by_more_than_a_turn() -> None:
    served = PolicySteps("A", slots=1, rows=2)
    for _ in range(200):
        served.submit(None, tokens=8, client="flood")
    served.step(20)
    other = served.submit(None, tokens=8, client="other")
    served.step(2 * 8)
    assert served.waits[other] <= 8


def test_a_client_that_comes_back_has_saved_nothing_up() -> None:
    served = PolicySteps("A", slots=1, rows=1)
    for _ in range(10):
        served.submit(None, tokens=4, client="a")
    served.step(12)
    for _ in range(5):
        served.submit(None, tokens=4, client="b")
    turns = []
    for _ in range(24):
        turns += [served.sequences[number].client for number in served.joined()]
    assert "a" in turns[:3]
    assert "b" in turns[:3]


def test_a_slot_is_taken_from_long_answers_after_a_bound() -> None:
    served = PolicySteps("AB", slots=1, preempt_after=3)
    long = served.submit("A", tokens=1000)
    served.step(3)
    number = served.submit("B", tokens=5)
    served.step(DRAIN_AFTER + 3 + 6)
    assert served.waits[number] <= DRAIN_AFTER + 3 + 3
    assert served.preempted[0] == long
    served.step(3 * (DRAIN_AFTER + 6))
    assert long in served.left  # it goes on


def test_who_waits_is_late_after_a_time_too() -> None:
    served = PolicySteps("AB", slots=1, max_wait_steps=10_000, preempt_after=0)
    served.submit("A", tokens=1000)
    served.step(3)
    number = served.submit("B", tokens=5)
    served.step(20)
    assert number not in served.waits
    served.now += 2.5
    served.step(20)
    assert number in served.waits


def test_a_request_is_marked_when_its_adapter_has_come_and_when_it_has_a_row() -> None:
    served = PolicySteps("AB", slots=2, rows=1, is_instant=False)
    served.submit("A", tokens=2)
    served.now = 1.0
    served.step()
    served.cache.end_loads()
    served.now = 4.0
    served.submit("A", "A", tokens=2)
    assert served.joined() == [0]
    first, second, third = served.sequences.values()
    assert (third.joined_at, third.answered_by) == (0.0, None)
    assert (first.arrived_at, first.ready_at, first.joined_at) == (0.0, 4.0, 4.0)
    assert first.answered_by == 1
    served.now = 7.0
    served.step(2)
    # It came when its adapter was there: it has waited for a row alone.
    assert (second.arrived_at, second.joined_at) == (4.0, 7.0)
    assert second.ready_at <= second.arrived_at
    served.preempt(second.id)
    served.now = 9.0
    served.step(2)
    assert second.joined_at == 7.0  # the first time


def test_a_request_of_the_base_model_has_waited_for_no_adapter() -> None:
    served = PolicySteps()
    served.now = 3.0
    served.submit(None)
    served.step()
    (request,) = served.sequences.values()
    assert (request.ready_at, request.joined_at, request.answered_by) == (0.0, 3.0, None)
