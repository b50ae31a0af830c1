"""The GPU benchmark's predictions, against the tables of docs/benchmarks/gpu.md; timing, rows."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.fakes.cpu_device import H200

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import plan_launches
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B
from trt_lora.scripts.bench.gpu.report import Expectation, ResultRow
from trt_lora.scripts.bench.gpu.roofline import (
    LAUNCH_COSTS,
    adapter_bytes,
    bytes_us,
    group_us,
    linear_us,
    overhead_percent,
    path_us,
    step_us,
)
from trt_lora.scripts.bench.gpu.runner import row_lines
from trt_lora.scripts.bench.gpu.session import Options
from trt_lora.scripts.bench.gpu.workloads import decode_step
from trt_lora.scripts.bench.gpu.workloads.decode_step import DECODE, FIRST
from trt_lora.scripts.measuring.turns import Spread, alternate

# ---- predictions


def test_predictions_are_those_of_the_page() -> None:
    assert adapter_bytes(16) / 1e6 == pytest.approx(84, abs=0.5)
    assert [step_us(m) / 1e3 for m in (1, 32, 512, 2048)] == pytest.approx(
        [3.49, 3.53, 9.29, 36.43], abs=0.005
    )
    assert linear_us(LLAMA_3_8B.groups["qkv"][0], 1) == pytest.approx(7.81, abs=0.005)
    q = LLAMA_3_8B.groups["qkv"][:1]
    assert group_us(q, 32, 64, LAUNCH_COSTS["ours"]) == pytest.approx(0.43, abs=0.005)
    down = LLAMA_3_8B.groups["down"]
    assert group_us(down, 2048, 256, LAUNCH_COSTS["ours"]) == pytest.approx(24.47, abs=0.005)


@pytest.mark.parametrize(
    ("scheme", "m", "rank", "us"),
    [
        ("ours", 1, 16, 21),
        ("ours", 512, 64, 936),
        ("native_static", 512, 16, 1629),
        ("native_dynamic", 1, 16, 62),
        ("native_dynamic", 32, 256, 1039),
    ],
)
def test_bytes_of_a_step_are_those_of_the_page(scheme: str, m: int, rank: int, us: int) -> None:
    assert bytes_us(m, rank, LAUNCH_COSTS[scheme]) == pytest.approx(us, abs=0.6)


@pytest.mark.parametrize(
    ("scheme", "m", "rank", "low", "high"),
    [
        ("ours_two_streams", 1, 16, 0.6, 9.8),
        ("ours_two_streams", 8, 16, 0.9, 10.1),
        ("ours", 1, 16, 6.1, 9.8),
        ("native_static", 1, 16, 15.8, 25.9),
        ("native_dynamic", 1, 16, 36.1, 59.0),
        ("native_dynamic", 64, 256, 65.5, 87.9),
    ],
)
def test_overheads_are_those_of_the_page(
    scheme: str, m: int, rank: int, low: float, high: float
) -> None:
    assert overhead_percent(m, rank, LAUNCH_COSTS[scheme]) == pytest.approx((low, high), abs=0.06)


@pytest.mark.parametrize(
    ("instructions", "rounds", "low", "high"),
    [(598, 2, 1.2, 1.9), (561, 1, 0.9, 1.5), (508, 1, 0.9, 1.4), (641, 2, 1.3, 2.0)],
    ids=list(LLAMA_3_8B.groups),
)
def test_paths_are_those_of_the_page(
    instructions: int, rounds: int, low: float, high: float
) -> None:
    assert path_us(instructions, rounds) == pytest.approx((low, high), abs=0.06)


def test_a_node_is_predicted_for_every_launch_that_is_planned() -> None:
    expected = decode_step.decode_expectations(Options(), FIRST + DECODE)
    for m, rank in ((1, 16), (8, 16), (64, 256)):
        nodes = launches(m, rank)
        cost = replace(LAUNCH_COSTS["ours"], nodes=nodes)
        found = expected[f"m{m} r{rank}"]["ours overhead, %"]
        assert (found.low, found.high) == pytest.approx(overhead_percent(m, rank, cost))
    targets = {name: row["ours overhead, %"].at_most for name, row in expected.items()}
    assert targets["m1 r16"] == targets["m32 r16"] == 8.0
    assert targets["m64 r16"] is None


def launches(m: int, rank: int) -> int:
    """Of a layer."""
    shapes = [
        GroupShape(m, group[0].k, tuple(SiteShape(i.n, rank) for i in group), "float16", True)
        for group in LLAMA_3_8B.groups.values()
    ]
    return sum(len(plan_launches(shape, H200)) for shape in shapes)


def test_a_second_stream_hides_launches_at_best_and_none_at_worst() -> None:
    one, two = (overhead_percent(8, 16, LAUNCH_COSTS[n]) for n in ("ours", "ours_two_streams"))
    assert two[0] == pytest.approx(
        100 * bytes_us(8, 16, LAUNCH_COSTS["ours_two_streams"]) / step_us(8)
    )
    assert two[0] < one[0] < two[1] == one[1]


# ---- timing


def test_versions_alternate_and_ratios_pair_what_ran_together() -> None:
    orders: list[list[str]] = []

    def sample(order: Sequence[str]) -> list[float]:
        orders.append(list(order))
        slow = 1.0 + len(orders)  # the clock drifts, for both alike
        return [slow * {"a": 10.0, "b": 15.0}[name] for name in order]

    times = alternate(["a", "b"], sample, rounds=4)
    assert orders == [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    assert times.ratio("b", "a") == Spread(1.5, 1.5, 1.5)
    assert times.overhead_percent("b", "a").median == pytest.approx(50)
    assert times.median("a") == 35.0


def test_a_spread_is_the_middle_half_of_the_rounds() -> None:
    values = iter([1.0, 2.0, 3.0, 4.0, 100.0])
    times = alternate(["a"], lambda order: [next(values)], rounds=5)
    assert times.samples["a"] == [1.0, 2.0, 3.0, 4.0, 100.0]
    assert times.ratio("a", "a") == Spread(1.0, 1.0, 1.0)


# ---- results


def test_a_row_holds_prediction_gap_and_target_beside_the_result() -> None:
    row = ResultRow(
        "x", {"m": 1}, {"ours_us": 2.0}, {"overhead, %": Spread(9.5, 9.0, 9.75), "ok": 1.0}
    )
    expected = {"overhead, %": Expectation(4.7, 7.5, at_most=8.0), "ok": Expectation(at_least=1.0)}
    written = row.to_json(expected)
    assert written["variants"] == {"ours_us": 2.0}
    assert written["ratios"]["overhead, %"] == {
        "value": 9.5,
        "spread": [9.0, 9.75],
        "prediction": [4.7, 7.5],
        "gap": 2.0,
        "target": "at most 8",
        "met": False,
    }
    assert written["ratios"]["ok"] == {"value": 1.0, "target": "at least 1", "met": True}
    text = "\n".join(row_lines(written))
    assert "predicted 4.7 to 7.5, gap 2; target at most 8: MISSED" in text


def test_what_is_no_number_meets_no_target_and_is_valid_json() -> None:
    row = ResultRow("x", {}, ratios={"d": float("nan")}).to_json(
        {"d": Expectation(0, 1, at_most=0.1)}
    )
    assert row["ratios"]["d"]["met"] is False
    assert json.loads(json.dumps(row, allow_nan=False))["ratios"]["d"]["value"] is None
    assert "d = NaN" in "\n".join(row_lines(row))
