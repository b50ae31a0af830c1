"""The peers' benchmark with fake peers: rounds, failures, ratios, what is written."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.fakes import fake_peers

from trt_lora.scripts.bench.peers import __main__ as bench_peers
from trt_lora.scripts.bench.peers.peer import PeerAnswer
from trt_lora.scripts.bench.peers.peer_list import OURS, PEERS, PeerEntry
from trt_lora.scripts.bench.peers.process import PeerError, PeerProcess
from trt_lora.scripts.bench.peers.rounds import WARM_UP, Cell, Results, Rounds
from trt_lora.scripts.report.speed_charts import peer_charts

FAKES = Path(fake_peers.__file__).parent
SMALL, LARGE = Cell(1, 4), Cell(2, 4)


def entry(name: str, place: str) -> PeerEntry:
    return PeerEntry(name, f"{name} title", place, ("numpy",))


def measure(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *entries: PeerEntry,
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run the benchmark as the command line does, in the folder of the fakes."""
    monkeypatch.chdir(FAKES)
    arguments = ["--batch", "1", "2", "--context", "4", "--steps", "3", "--rounds", "2"]
    output = ["--prompt-ids", "7", "8", "--output", str(folder / "peers.json")]
    bench_peers.main([*arguments, *output, *options], entries)
    report: dict[str, Any] = json.loads((folder / "peers.json").read_text())
    return report


def test_peers_take_turns_and_are_compared_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = entry(OURS, "fake_peers:Ours"), entry("slow", "fake_peers:Slower")
    report = measure(tmp_path, monkeypatch, *entries, options=("--bits", "slow=4/8"))
    assert report["peers"]["slow"]["bits of linears/head"] == "4/8"
    assert [(cell["batch"], cell["context"]) for cell in report["cells"]] == [SMALL, LARGE]
    for cell in report["cells"]:
        ours, slow = cell["peers"][OURS], cell["peers"]["slow"]
        assert ours["decode, tokens/s"] == cell["batch"] * 3 / 0.5
        assert ours["prompt, ms"] == 1000
        assert slow["decode, tokens/s"] == ours["decode, tokens/s"] / fake_peers.SLOW
        assert slow["prompt, ms"] == ours["prompt, ms"] * fake_peers.SLOW
        assert ours["rounds"] == slow["rounds"] == 2
    assert report["peers"]["slow"]["tokens as ours"] == "9 of 9"
    printed = capsys.readouterr().out
    assert "slow decode, tokens/s / ours = 0.5" in printed
    assert "slow prompt, ms / ours = 2" in printed
    charts = peer_charts(tmp_path / "peers.json")
    assert [chart.title for chart in charts][:1] == ["Decode, tokens/s, 1 x 4 tokens"]


def test_a_peer_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--python", "--bits"):
        with pytest.raises(SystemExit):
            measure(tmp_path, monkeypatch, *PEERS, options=(option, "other=4/8"))
        assert f"{option} names other; peers are ours, peft, " in capsys.readouterr().err


def test_every_opening_loads_the_peers_anew_and_its_rounds_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Counted(PeerProcess):
        def __init__(self, entry: PeerEntry, *rest: Any) -> None:
            started.append(entry.name)
            super().__init__(entry, *rest)

    monkeypatch.setattr(bench_peers, "PeerProcess", Counted)
    entries = entry(OURS, "fake_peers:Ours"), entry("one", "fake_peers:OnlyOneRow")
    report = measure(tmp_path, monkeypatch, *entries, options=("--openings", "3"))
    assert started == [OURS, "one"] * 3
    small, large = report["cells"]
    assert [row["rounds"] for row in small["peers"].values()] == [6, 3]  # one fails in each
    assert large["peers"][OURS]["rounds"] == 6
    assert report["peers"]["one"]["error"].endswith("ValueError: one row at a time")
    assert report["settings"]["openings"] == 3


def test_every_turn_begins_with_an_answer_that_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[list[int]]] = []

    class Told(PeerProcess):
        def ask(self, ids: list[list[int]], steps: int, seconds: float) -> PeerAnswer:
            asked.append(ids)
            return super().ask(ids, steps, seconds)

    monkeypatch.setattr(bench_peers, "PeerProcess", Told)
    options = ("--batch", str(WARM_UP.batch), "--context", str(WARM_UP.context))
    report = measure(tmp_path, monkeypatch, entry(OURS, "fake_peers:Ours"), options=options)
    question, *turns = asked
    assert question == [[7, 8]]
    assert [Cell(len(ids), len(ids[0])) for ids in turns] == [WARM_UP] * 4
    assert len({tuple(ids[0][:2]) for ids in turns}) == 4  # none that a peer remembers
    assert [cell["peers"][OURS]["rounds"] for cell in report["cells"]] == [2]


def test_a_peer_that_is_not_installed_fails_or_dies_has_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        entry(OURS, "fake_peers:Ours"),
        entry("missing", "no_such_package:Peer"),
        entry("no-python", "fake_peers:Ours"),
        entry("one", "fake_peers:OnlyOneRow"),
        entry("short", "fake_peers:TooShort"),
        entry("dying", "fake_peers:Dying"),
        entry("inert", "fake_peers:WithoutAdapter"),
        PeerEntry("no-files", "no files", "fake_peers:Ours", (), "a folder"),
    )
    options = ("--python", f"no-python={tmp_path}/none")
    report = measure(tmp_path, monkeypatch, *entries, options=options)
    errors = {name: peer["error"] for name, peer in report["peers"].items() if "error" in peer}
    assert set(errors) == {"missing", "no-python", "one", "short", "dying", "no-files"}
    assert errors["missing"].startswith("not installed: No module named 'no_such_package'")
    assert errors["no-python"].startswith("not installed: ")
    assert errors["one"].endswith("ValueError: one row at a time")
    assert errors["short"] == "RuntimeError: rows of [1] tokens, expected 9"
    assert errors["dying"] == "its process ended: out of luck"
    assert errors["no-files"].startswith("not measured: --no-files-files is not given")
    assert [set(cell["peers"]) for cell in report["cells"]] == [
        {OURS, "one", "inert"},
        {OURS, "inert"},
    ]
    assert report["peers"]["inert"]["tokens as ours"] == "1 of 9"
    printed = capsys.readouterr().out
    assert all(f"title: {e.title}" in printed for e in entries)


class Sleeper:
    """A peer whose rounds take as long as their rows are many."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.asked: list[tuple[int, int]] = []

    def ask(self, ids: list[list[int]], steps: int, seconds: float) -> PeerAnswer:
        self.asked.append((len(ids), ids[0][0]))
        self.clock[0] += len(ids)
        return PeerAnswer(1.0, 1.0, [[0] * (steps + 1)] * len(ids))


def test_rounds_go_on_while_the_last_one_of_a_cell_fits_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    peer, results = Sleeper(clock), Results({Cell(8, 4): {}, Cell(1, 4): {}})
    Rounds(3, most=5, deadline=26.0, answer_seconds=9.0).run(
        {"a": peer}, results, log=lambda line: None
    )
    # With a row that warms up, 2 + 9 once, 2 + 9 again, 2 + 2; 9 more would end after 26 seconds.
    assert [rows for rows, _ in peer.asked[1::2]] == [1, 8, 1, 8, 1, 1]
    assert {cell: len(found["a"]) for cell, found in results.answers.items()} == {
        Cell(8, 4): 2,
        Cell(1, 4): 4,
    }


class Recorder:
    """A peer that notes its turn; some fail."""

    def __init__(self, name: str, turns: list[str], *, fails: bool = False) -> None:
        self.name, self.turns, self.fails = name, turns, fails

    def ask(self, ids: list[list[int]], steps: int, seconds: float) -> PeerAnswer:
        self.turns.append(self.name)
        if self.fails:
            raise PeerError("broken")
        return PeerAnswer(1.0, 1.0, [[0] * (steps + 1)])


def test_another_peer_begins_each_round_and_one_that_failed_is_asked_no_more() -> None:
    turns: list[str] = []
    peers = {name: Recorder(name, turns, fails=name == "b") for name in "abc"}
    results = Results({SMALL: {}})
    rounds = Rounds(3, most=3, deadline=time.monotonic() + 60, answer_seconds=9.0)
    rounds.run(peers, results, log=lambda line: None)
    assert turns == [*"aabcc", *"ccaa", *"ccaa"]  # twice each: what warms up, and what counts
    assert results.errors == {"b": f"{SMALL}: broken"}


def test_prompts_share_no_beginning_between_rows_and_rounds() -> None:
    rows = [row for seed in range(3) for row in Cell(8, 64).prompts(seed)]
    assert len({tuple(row[:2]) for row in rows}) == len(rows) == 24
    assert {len(row) for row in rows} == {64}


def test_every_peer_has_a_file_of_its_own_place() -> None:
    root = Path(bench_peers.__file__).parents[3]
    for peer in PEERS:
        module, _, name = peer.place.partition(":")
        file = root / (module.removeprefix("trt_lora.").replace(".", "/") + ".py")
        assert f"class {name}" in file.read_text()
