"""Start-up times of the commands of the first hour, one column an environment; prints a table.

    python -m trt_lora.scripts.bench.first_hour ENGINE NAME=BIN [NAME=BIN ...]

ENGINE has a tokenizer, and a small one shows what is not the model's. BIN is the `bin` folder of a
virtual environment.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_lora.scripts.measuring.seconds import Seconds

RUNS = 7  # of a command in an environment, after one that warms the disk


@dataclass(frozen=True)
class TimedCommand:
    """What is typed, and what is said to it then; ENGINE stands for the engine's folder."""

    title: str
    words: tuple[str, ...]
    said: str = ""


COMMANDS = (
    TimedCommand("python, doing nothing", ("python", "-c", "pass")),
    TimedCommand("`import trt_lora.runtime`", ("python", "-c", "import trt_lora.runtime")),
    TimedCommand("`trt-lora --help`", ("trt-lora", "--help")),
    TimedCommand("`build-engine --help`", ("build-engine", "--help")),
    TimedCommand("`trt-lora inspect ENGINE`", ("trt-lora", "inspect", "ENGINE")),
    TimedCommand(
        "`trt-lora chat ENGINE`, to the first token",
        ("trt-lora", "chat", "ENGINE", "--max-tokens", "1"),
        "hello\n/quit\n",
    ),
)


def seconds_of_command(command: TimedCommand, environment: Path, engine: Path) -> Seconds:
    """Run once, from the start of its process to the end.

    Raises:
        RuntimeError: it fails; what it printed is in the message.
    """
    program, *arguments = (str(engine) if word == "ENGINE" else word for word in command.words)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        said.write(command.said.encode())
        said.seek(0)
        clock = time.perf_counter()
        process = subprocess.Popen(
            [str(environment / program), *arguments],
            stdin=said,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - clock
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise RuntimeError(f"{environment / program}: {printed.read().decode()[-500:]}")
    return Seconds(wall, usage.ru_utime + usage.ru_stime)


def measure(
    environments: Mapping[str, Path], engine: Path, runs: int = RUNS
) -> dict[str, dict[str, Seconds]]:
    """Return the medians of every command, by its title and the environment's name.

    The environments take turns, so that a busy moment of the machine is a moment of all.
    """
    found: dict[str, dict[str, Seconds]] = {}
    for command in COMMANDS:
        taken: dict[str, list[Seconds]] = {name: [] for name in environments}
        for _ in range(runs + 1):
            for name, environment in environments.items():
                taken[name].append(seconds_of_command(command, environment, engine))
        found[command.title] = {name: _medians(rows[1:]) for name, rows in taken.items()}
    return found


def _medians(rows: Sequence[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(column) for column in zip(*rows, strict=True)))


def markdown(found: Mapping[str, Mapping[str, Seconds]]) -> str:
    """Return a table: wall seconds, and in brackets those of the processors."""
    names = list(next(iter(found.values())))
    rows = [["", *names], ["---"] * (1 + len(names))]
    for title, columns in found.items():
        cells = (f"{taken.wall:.2f} ({taken.processors:.2f})" for taken in columns.values())
        rows.append([title, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("environments", nargs="+", metavar="NAME=BIN")
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args(argv)
    pairs = (text.partition("=") for text in args.environments)
    environments = {name: Path(folder) for name, _, folder in pairs}
    print(markdown(measure(environments, args.engine, args.runs)), end="")


if __name__ == "__main__":
    main()
