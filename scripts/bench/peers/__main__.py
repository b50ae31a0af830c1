"""Decode and prompt time on a CPU beside other ways to run a model with an adapter.

    python -m trt_lora.scripts.bench.peers --python genai=VENV --genai-files FOLDER ...

Each peer has a process of its own, in its own interpreter; they take turns. A peer whose package is
missing has a row that says so. docs/benchmarks/peers.md tells how the peers' files are made.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.scripts.bench.peers.peer_list import OURS, PEERS, PeerEntry
from trt_lora.scripts.bench.peers.process import PeerError, PeerProcess
from trt_lora.scripts.bench.peers.rounds import TIMES, Cell, Results, Rounds
from trt_lora.scripts.measuring.machine import machine_of
from trt_lora.scripts.measuring.report import Report, ResultRow, row_lines

OUTPUT = Path("docs/benchmarks/peers.json")
ROOT = Path(__file__).resolve().parents[3]  # of the checkout
CHECK = "What is the capital of Portugal?"
CHECK_STEPS = 8
LOAD_SECONDS, ANSWER_SECONDS = 120.0, 240.0
SECONDS = 180.0  # of the rounds, where the peers are one workload among others


def main(argv: Sequence[str] | None = None, entries: Sequence[PeerEntry] = PEERS) -> None:
    """Measure, print the rows, write JSON as `trt-lora report --peers` reads it."""
    run = PeerRun(_arguments(argv, entries), entries)
    run.measure()
    settings = {name: getattr(run.args, name) for name in ("threads", "steps", "openings")}
    cells = [{**cell._asdict(), "peers": run.medians(cell)} for cell in run.results.answers]
    machine = machine_of(HOST)
    Report(run.args.output).put(settings=settings, machine=machine, peers=run.peers, cells=cells)
    for row in run.rows():
        print("\n".join(row_lines(row.to_json())))


def rows() -> Iterator[ResultRow]:
    """Measure the peers that are installed here: ours on the demo's engine, PEFT, merged."""
    from trt_lora.scripts.demo.__main__ import ENGINE

    words = ["--ours-files", str(ENGINE), "--seconds", str(SECONDS)]
    run = PeerRun(_arguments(words, PEERS), PEERS)
    run.measure()
    yield from run.rows()


class PeerRun:
    """The peers, and what came of them."""

    def __init__(self, args: argparse.Namespace, entries: Sequence[PeerEntry]) -> None:
        """Begin without an answer."""
        self.args, self.entries = args, entries
        # Of each: title, versions, what went wrong.
        self.peers: dict[str, dict[str, Any]] = {e.name: {"title": e.title} for e in entries}
        for name, bits in args.bits.items():
            self.peers[name]["bits of linears/head"] = bits
        self.results = Results({Cell(*cell): {} for cell in product(args.batch, args.context)})

    def measure(self) -> None:
        """Load every peer and let them take turns, as often as they are to be loaded anew."""
        args = self.args
        with tempfile.TemporaryDirectory() as name:
            for _ in range(args.openings):
                with ExitStack() as stack:
                    processes = self._loaded(Path(name), stack)
                    question = args.prompt_ids or TextTokenizer(args.model).encode(CHECK)
                    self._check(processes, [*question])
                    deadline = time.monotonic() + args.seconds / args.openings
                    rounds = Rounds(args.steps, args.rounds, deadline, ANSWER_SECONDS)
                    rounds.run(processes, self.results, _log)
        for name, error in self.results.errors.items():
            self.peers[name]["error"] = error

    def medians(self, cell: Cell) -> dict[str, dict[str, float]]:
        """Return what each peer took for a cell."""
        return self.results.medians(cell, self.args.steps)

    def rows(self) -> Iterator[ResultRow]:
        """Yield a row for each cell, and one for each peer with its versions or what went wrong.

        Ratios above 1: a peer's decode is faster than ours, and its prompt slower.
        """
        for cell in self.results.answers:
            medians = self.medians(cell)
            ours = medians.get(OURS)
            times = [(name, what, row[what]) for name, row in medians.items() for what in TIMES]
            yield ResultRow(
                str(cell),
                {"rounds": {name: row["rounds"] for name, row in medians.items()}},
                {f"{name} {what}": value for name, what, value in times},
                {
                    f"{name} {what} / ours": value / ours[what]
                    for name, what, value in times
                    if ours and name != OURS
                },
            )
        yield from (ResultRow(name, notes=notes) for name, notes in self.peers.items())

    def _loaded(self, folder: Path, stack: ExitStack) -> dict[str, PeerProcess]:
        """Start and load one after another; note of each what came of it."""
        loaded = {}
        for entry in self.entries:
            try:
                process = self._process(entry, folder, stack)
                self.peers[entry.name]["versions"] = process.versions(LOAD_SECONDS)
            except PeerError as error:
                self.peers[entry.name]["error"] = str(error)
            else:
                loaded[entry.name] = process
        return loaded

    def _process(self, entry: PeerEntry, folder: Path, stack: ExitStack) -> PeerProcess:
        args, files = self.args, getattr(self.args, f"{entry.name}_files", "")
        if entry.files and not files:
            raise PeerError(f"not measured: --{entry.name}-files is not given; it is {entry.files}")
        setup = {
            "files": [str(Path(file).resolve()) for file in files.split(",") if file],
            "model": str(args.model.resolve()),
            "adapter": str(args.adapter.resolve()),
            "threads": args.threads,
            "max_rows": max(args.batch),
            "max_len": max(args.context) + args.steps + 1,
        }
        logs = args.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        python = args.pythons.get(entry.name, Path(sys.executable))
        log = logs / f"{entry.name}.log"
        return stack.enter_context(PeerProcess(entry, python, setup, ROOT / "src", log))

    def _check(self, processes: dict[str, PeerProcess], ids: list[int]) -> None:
        """Note how many tokens of one answer are ours; an adapter without effect shows here."""
        answers = {}
        for name, process in list(processes.items()):
            try:
                answers[name] = process.ask([ids], CHECK_STEPS, ANSWER_SECONDS).tokens[0]
            except PeerError as error:
                self.peers[name]["error"] = str(error)
                del processes[name]
        for name, tokens in answers.items() if OURS in answers else ():
            same = [token == ours for token, ours in zip(tokens, answers[OURS], strict=True)]
            until = [*same, False].index(False)
            self.peers[name]["tokens as ours"] = f"{until} of {len(same)}"


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None, entries: Sequence[PeerEntry]) -> argparse.Namespace:
    names = ", ".join(entry.name for entry in entries)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--python", action="append", default=[], metavar="PEER=PATH", help=f"interpreter or "
        f"virtual environment of a peer (default: this one); peers are {names}")  # fmt: skip
    add("--bits", action="append", default=[], metavar="PEER=LINEARS/HEAD", help="of the weights "
        "in a peer's files, for the report, such as genai=4/8")  # fmt: skip
    for entry in entries:
        if entry.files:
            add(f"--{entry.name}-files", default="", metavar="PATH", help=entry.files)
    add("--model", type=Path, default=Path("build/smollm2"), help="transformers model")
    add("--adapter", type=Path, default=Path("tests/adapters/json"), help="PEFT adapter")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--context", type=int, nargs="+", default=[64, 512, 1536], help="tokens of a prompt")
    add("--steps", type=int, default=16, help="tokens a row after the first")
    add("--rounds", type=int, default=7, help="of each workload and opening, most")
    often = "how often each peer is loaded anew, in the same time"
    add("--openings", type=int, default=1, help=often)
    add("--seconds", type=float, default=440.0, help="no round is begun that would end later")
    add("--threads", type=int, default=2)
    add("--prompt-ids", type=int, nargs="+", help="of the check (default: a question)")
    add("--logs", type=Path, help="folder for what peers print (default: a temporary one)")
    add("--output", type=Path, default=OUTPUT, help="JSON file")
    args = parser.parse_args(argv)
    for option in ("python", "bits"):
        given = dict(text.partition("=")[::2] for text in getattr(args, option))
        if unknown := given.keys() - {entry.name for entry in entries}:
            parser.error(f"--{option} names {', '.join(sorted(unknown))}; peers are {names}")
        setattr(args, option, given)
    paths = {name: Path(path) for name, path in args.python.items()}
    args.pythons = {n: p / "bin" / "python" if p.is_dir() else p for n, p in paths.items()}
    return args


if __name__ == "__main__":
    main()
