"""`trt-lora list`: the engines and adapters under a folder, by their headers.

The nearest are found first. Hidden folders and other file systems are not looked into. Ctrl-C
prints what was found so far.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trt_lora.plugins.messages import listed
from trt_lora.scripts.diagnosis.folder import (
    FolderSearch,
    Found,
    FoundAdapter,
    FoundEngine,
    Unreadable,
)
from trt_lora.scripts.terminal.console import INTERRUPTED, note, print_table, say, warn
from trt_lora.scripts.terminal.printing import print_json

MOST = 10_000  # folders to look into: five seconds where their names are in memory
EVERY = 1_000  # of them, say where it is
_KERNELS = ("/dev", "/proc", "/sys")  # no files of a user; not worth a note

_ENGINES = ("engine", "base model", "dtype", "plan", "ranks", "adapters", "rows", "tokens", "MB")
_ADAPTERS = ("adapter", "base model", "dtype", "ranks", "sites")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="default: this one")
    add("--folders", type=int, default=MOST, metavar="N", help=f"look into so many ({MOST})")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_list)


def _list(args: argparse.Namespace) -> None:
    search, found = FolderSearch(args.folder, args.folders, _watch), list[Found]()
    is_interrupted = False
    try:
        for item in search:
            found.append(item)  # each is kept when Ctrl-C comes
    except KeyboardInterrupt:
        is_interrupted = True
    found.sort(key=lambda item: Path(item.path).parts)
    _print(args.folder, found, complete=search.next is None, as_json=args.json)
    for text in _notes(search, args.folders, is_interrupted=is_interrupted):
        note(text)
    if is_interrupted:
        sys.exit(INTERRUPTED)


def _watch(count: int, folder: Path) -> None:
    if count and count % EVERY == 0:
        say(f"{count} folders, now in {folder}")


def _notes(search: FolderSearch, most: int, *, is_interrupted: bool) -> Iterator[str]:
    """Where it has not looked, and how it would."""
    if is_interrupted:
        yield f"interrupted before {search.next}"
    elif search.next is not None:
        yield (
            f"stopped after {most} folders, before {search.next}; list a folder further in, or "
            f"pass --folders {2 * most}"
        )
    if elsewhere := [str(path) for path in search.elsewhere if str(path) not in _KERNELS]:
        names = "it by its name" if len(elsewhere) == 1 else "them by their names"
        where = f"on another file system, and not looked into: {listed(elsewhere)}"
        yield f"{where}; list {names}"


def _print(folder: Path, found: Sequence[Found], *, complete: bool, as_json: bool) -> None:
    engines = [item for item in found if isinstance(item, FoundEngine)]
    adapters = [item for item in found if isinstance(item, FoundAdapter)]
    unreadable = [item for item in found if isinstance(item, Unreadable)]
    if as_json:
        lists = {
            "engines": _as_json(engines),
            "adapters": _as_json(adapters),
            "unreadable": _as_json(unreadable),
        }
        print_json({**lists, "complete": complete})
        return
    if engines:
        print_table(_ENGINES, [_engine_row(engine) for engine in engines])
    if engines and adapters:
        print()
    if adapters:
        print_table(_ADAPTERS, [_adapter_row(adapter) for adapter in adapters])
    for item in unreadable:
        warn(item.reason)
    if not engines and not adapters:
        print(f"{folder}: no engine and no adapter{'' if complete else ' so far'}")


def _as_json(items: Sequence[Found]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(item) for item in items]


def _engine_row(engine: FoundEngine) -> tuple[str, ...]:
    adapters = f"{engine.max_loras} a batch" if engine.max_loras else "1 a batch"
    limits = (f"{most or '-'}" for most in (engine.max_batch_size, engine.max_seq_len))  # a graph's
    sizes = (*limits, f"{engine.size_bytes / 1e6:.0f}")
    ranks = f"1-{engine.max_lora_rank}"
    return engine.path, engine.base_model, engine.dtype, engine.flavour, ranks, adapters, *sizes


def _adapter_row(adapter: FoundAdapter) -> tuple[str, ...]:
    ranks = sorted({adapter.ranks[0], adapter.ranks[-1]}) if adapter.ranks else []
    return (
        adapter.path,
        adapter.base_model or "-",
        " ".join(adapter.dtypes) or "-",
        "-".join(map(str, ranks)) or "-",
        f"{adapter.sites}",
    )
