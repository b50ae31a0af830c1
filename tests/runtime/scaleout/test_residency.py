"""Which replica a request goes to."""

from collections.abc import Sequence
from dataclasses import replace

from trt_lora.runtime.scaleout.residency import Residency, differing, ranked

NAMES = [f"a{number}" for number in range(64)]
SPILL = 8


def has(*names: str, slots: int = 4, wanted: Sequence[str] = (), queue: int = 0) -> Residency:
    return Residency(slots, dict.fromkeys(names, (1, "x")), wanted, queue)


def best(replicas: dict[str, Residency], *adapters: str) -> str:
    return ranked(replicas, adapters, SPILL)[0]


def test_a_replica_that_has_the_adapter_comes_before_one_with_a_free_slot() -> None:
    replicas = {"free": has(), "has": has("a", "b", "c", "d"), "full": has("b", "c", "d", "e")}
    for name in ("free", "full"):
        assert ranked({**replicas, name: replicas[name]}, ["a"], SPILL) == ["has", "free", "full"]
    assert ranked(replicas, ["z"], SPILL)[0] == "free"
    assert best(replicas, "a", "b") == "has"


def test_a_slot_that_a_request_waits_for_is_not_free() -> None:
    replicas = {"waits": has("b", slots=2, wanted=["c"]), "free": has("b", slots=2)}
    assert {best(replicas, name) for name in NAMES} == {"free"}
    # Its own request waits there already: that slot is for it.
    assert best(
        {"waits": has("b", slots=2, wanted=["a"]), "full": has("b", "c", slots=2)}, "a"
    ) == ("waits")


def test_an_engine_without_slots_always_has_one_free() -> None:
    assert best({"none": has(*NAMES, slots=0), "full": has(*NAMES, slots=64)}, "z") == "none"


def test_adapters_have_homes_which_another_replica_does_not_move() -> None:
    two, three = {"x": has(), "y": has()}, {"x": has(), "y": has(), "z": has()}
    before = {name: best(two, name) for name in NAMES}
    after = {name: best(three, name) for name in NAMES}
    assert 16 < sum(home == "x" for home in before.values()) < 48
    moved = {name for name in NAMES if after[name] != before[name]}
    assert {after[name] for name in moved} == {"z"}
    assert 8 < len(moved) < 36


def test_one_hot_adapter_spreads() -> None:
    replicas = {"has": has("a", queue=SPILL), "other": has()}
    assert best(replicas, "a") == "has"
    assert best({**replicas, "has": has("a", queue=SPILL + 1)}, "a") == "other"


def test_a_row_that_is_free_is_worth_an_adapter_in_a_slot_that_is_free_too() -> None:
    full = replace(has("a"), queue=8, rows=8)
    assert full.is_full
    assert not replace(full, queue=7).is_full
    free = {"x": full, "y": replace(has("b"), rows=8)}
    assert best(free, "a") == best({**free, "y": has("a")}, "a") == "y"
    # Without a slot free, its adapter would cost another one its slot.
    assert best({"x": full, "y": has("b", "c", "d", "e")}, "a") == "x"
    # Without a row free, it would wait there too.
    assert best({"x": full, "y": replace(full, resident={}, queue=9)}, "a") == "x"


def test_requests_of_the_base_model_go_to_the_shortest_queue_and_not_all_to_one() -> None:
    assert best({"x": has(queue=2), "y": has(queue=1)}) == "y"
    assert {best({"x": has(), "y": has()}) for _ in range(64)} == {"x", "y"}


def test_newer_contents_are_preferred_and_counts_alone_are_not() -> None:
    for name in NAMES:  # of some of them either replica is the home
        old, new = Residency(4, {name: (1, "old")}), Residency(4, {name: (2, "new")})
        assert best({"x": old, "y": new}, name) == "y"
        assert differing({"x": old, "y": new}) == [name]
    # A replica that started later has counted less.
    same = {
        "x": Residency(4, {n: (1, n) for n in NAMES}),
        "y": Residency(4, {n: (9, n) for n in NAMES}),
    }
    assert differing(same) == []
    assert {best(same, name) for name in NAMES} == {"x", "y"}


def test_a_replica_that_has_said_nothing_yet_is_taken() -> None:
    assert best({"new": Residency(), "full": has(*NAMES, slots=64)}, "z") == "new"
