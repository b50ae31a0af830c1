"""`trt-lora list`: the engines and adapters under a folder, by their headers."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trt_lora.scripts.diagnosis.folder import Found, FoundAdapter, FoundEngine, Unreadable, find
from trt_lora.scripts.terminal.console import print_table, warn
from trt_lora.scripts.terminal.printing.json_output import print_json

_ENGINES = ("engine", "base model", "dtype", "plan", "ranks", "adapters", "rows", "tokens", "MB")
_ADAPTERS = ("adapter", "base model", "dtype", "ranks", "sites")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="default: this one")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_list)


def _list(args: argparse.Namespace) -> None:
    found = list(find(args.folder))
    engines = [item for item in found if isinstance(item, FoundEngine)]
    adapters = [item for item in found if isinstance(item, FoundAdapter)]
    unreadable = [item for item in found if isinstance(item, Unreadable)]
    if args.json:
        kinds: dict[str, Sequence[Found]] = {
            "engines": engines,
            "adapters": adapters,
            "unreadable": unreadable,
        }
        print_json({kind: _as_json(items) for kind, items in kinds.items()})
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
        print(f"{args.folder}: no engine and no adapter")


def _as_json(items: Sequence[Found]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(item) for item in items]


def _engine_row(engine: FoundEngine) -> tuple[str, ...]:
    adapters = f"{engine.max_loras} a batch" if engine.max_loras else "1 a batch"
    sizes = (f"{engine.max_batch_size}", f"{engine.max_seq_len}", f"{engine.size_bytes / 1e6:.0f}")
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
