"""`trt-lora compare`: compare an engine's outputs with a reference, through polygraphy.

The base model and every adapter are run on the same inputs, a step of prefill and one of decode, in
processes of polygraphy's own; every output is compared, the cache among them. The inputs, outputs
and commands are kept, so that the comparison can be run again. It exits with 1 if an output is
out of tolerance, and with 2 if the comparison cannot be made.
"""

import argparse
import re
import sys
from datetime import datetime
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.comparison.comparison import BASE_CASE, Comparison
from trt_lora.scripts.comparison.comparison_setup import check_setup, write_inputs
from trt_lora.scripts.comparison.references import Reference
from trt_lora.scripts.comparison.report import print_rows, write_json
from trt_lora.scripts.comparison.shell_commands import require_tools
from trt_lora.scripts.terminal.adapters import adapter_paths
from trt_lora.scripts.terminal.printing import print_json
from trt_lora.scripts.terminal.stage_progress import stage_progress
from trt_lora.scripts.verification.tolerances import chosen_tolerance

DEFAULT_AGAINST = "merged"  # needs nothing but the engine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--adapter", action="append", default=[], metavar="NAME=PATH", help="may be repeated")
    add(
        "--against",
        default=DEFAULT_AGAINST,
        metavar="WHAT",
        help="merged: the adapter merged into the weights (default); native: LoRA without the "
        "plugin on a GPU, in float64 elsewhere; or another engine",
    )
    add("--prompt", metavar="TEXT", help="a user's message (default: random tokens)")
    add("--seed", type=int, default=0, help="of random tokens and of the decode step's cache")
    add("--tolerance", type=float, help="absolute (default: by dtype); relative is a tenth of it")
    add("--bisect", action="store_true", help="where outputs differ, name the first site that does")
    add("--keep", type=Path, metavar="DIR", help="folder to make (default: a new one here)")
    add("--keep-models", action="store_true", help="keep merged weights and the like too")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_compare)


def _compare(args: argparse.Namespace) -> None:
    """Print a table; exit with 1 beyond tolerance."""
    require_tools()
    setup = check_setup(args.engine, args.against, bisect=args.bisect)
    limit = chosen_tolerance(args.tolerance, setup.tolerance)
    adapters = _adapters(args.adapter)
    folder = _folder(args.keep, args.engine, setup.reference)
    comparison = Comparison(setup, adapters, folder, limit, args.bisect, args.keep_models)
    write_inputs(setup, comparison.cases, adapters, folder, args.prompt, args.seed)
    try:
        with stage_progress() as progress:
            rows = comparison.run(progress)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"what was made so far lies in {folder}")
        raise
    report = comparison.report(rows)
    write_json(report, folder)
    if args.json:
        print_json(report)
    else:
        if setup.reference.note:
            print(setup.reference.note)
        print_rows(rows)
        print(f"tolerance {limit:g}, relative {limit / 10:g}; kept in {folder}")
    idle = comparison.idle_adapters()
    for name in idle:
        print(f"error: {name} changes no output, so that nothing was compared", file=sys.stderr)
    if idle or not all(row.same for row in rows):
        sys.exit(1)


def _adapters(arguments: list[str]) -> dict[str, Path]:
    paths = adapter_paths(arguments)
    for name in paths:
        if not re.fullmatch(r"\w[\w.-]*", name) or name == BASE_CASE:
            raise ConfigError(
                f"--adapter names an adapter {name!r}; give each a name of its own, of letters, "
                f"digits, '.', '_' and '-', and not {BASE_CASE!r}"
            )
    return paths


def _folder(keep: Path | None, engine: Path, reference: Reference) -> Path:
    """The folder to keep everything in; it is made when there is something to write."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = keep or Path(f"compare-{engine.absolute().name}-{reference.name}-{stamp}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; give another folder to --keep")
    return folder
