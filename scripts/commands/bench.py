"""`trt-lora bench`: time to the first token, time of a token and memory, with adapters and without.

A graph has runs in the place of tokens, of random inputs at the sizes that its plan is tuned for.

Variants are the base model, the adapters, and random adapters of several ranks; on an engine for
many adapters, also rows with another adapter each. They take turns, and every ratio is of times of
the same round: "x base" above 1 is slower than the base model. How far rounds differ, min to max,
says how far the machine disturbed them; one round cannot.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.manifest import GRAPH, Manifest, refuse_graph
from trt_lora.scripts.terminal.adapters import adapter_paths, add_adapter_option
from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.terminal.printing import byte_size

if TYPE_CHECKING:
    from trt_lora.scripts.measuring.benchmark import Benchmark, VariantTimes
    from trt_lora.scripts.measuring.variants import Workload

ROUNDS = 5
_TIMES = ("", "first {0} ms", "{0} p50 ms", "p90", "p99", "{1}/s")
_RATIOS = ("x base", "first {0}", "{0}")
_SPREADS = ("x base", "first {0}", "min to max", "{0}", "min to max")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add_adapter_option(add)
    add("--rows", type=int, nargs="+", metavar="N", help="sizes of a batch (default: 1 and 8)")
    add("--prompt-tokens", type=int, metavar="N", help="of each row (default: 64)")
    add("--new-tokens", type=int, metavar="N", help="of each row (default: 32)")
    add("--shapes", nargs="+", metavar="NAME=SIZE", help="of a graph: sizes, such as batch=2")
    ranks = "of random adapters (default: 8, 16 and 64); --ranks alone: none"
    add("--ranks", type=int, nargs="*", metavar="R", help=ranks)
    add("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add("--export", type=Path, metavar="FILE.json", help="write them, over an earlier file")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_bench)


def _bench(args: argparse.Namespace) -> None:
    benchmark = _measured(args)
    if args.json:
        print(benchmark.to_json(), end="")
    else:
        _print(benchmark)
    if args.export:  # last: what took minutes to measure is on the screen if this fails
        with publish_file(args.export) as work:
            work.write_text(benchmark.to_json(), encoding="utf-8")


def _measured(args: argparse.Namespace) -> "Benchmark":
    # Not at the top: the help of a command is to come at once.
    from trt_lora.runtime import open_engine
    from trt_lora.scripts.measuring.measure import measure
    from trt_lora.scripts.measuring.variants import run_of
    from trt_lora.scripts.measuring.workload import ranks_of
    from trt_lora.scripts.terminal.stage_progress import stage_progress

    if args.export and (args.export.is_dir() or not args.export.parent.is_dir()):
        raise ConfigError(f"--export is {args.export}, expected a file in a folder that exists")
    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}, expected 1 or more")
    paths = adapter_paths(args.adapter)
    with stage_progress() as progress, open_engine(args.engine, args.backend) as engine:
        asked = _workloads(engine.manifest, args)
        ranks = ranks_of(engine.manifest, args.ranks)
        progress.stage("load")
        run = run_of(engine, paths, ranks)
        progress.stage("measure")
        return measure(engine, run, asked, args.rounds, progress.turn)


def _workloads(manifest: Manifest, args: argparse.Namespace) -> Sequence["Workload"]:
    """What is asked of a language model, or of a graph.

    Raises:
        ConfigError: an option is of the other kind, or a number beyond the engine's limits.
    """
    from trt_lora.scripts.measuring.graph_inputs import random_inputs
    from trt_lora.scripts.measuring.graph_runs import GraphWorkload
    from trt_lora.scripts.measuring.workload import workloads

    of_tokens = {"--rows": args.rows, "--prompt-tokens": args.prompt_tokens}
    of_tokens["--new-tokens"] = args.new_tokens
    if manifest.kind == GRAPH:
        for option in (option for option, value in of_tokens.items() if value is not None):
            refuse_graph(manifest, option, "trt-lora bench --shapes batch=8")
        inputs = random_inputs(manifest, args.shapes or ())
        return [GraphWorkload.of(manifest, inputs)]
    refuse_encoder(manifest, "trt-lora bench")
    if args.shapes:
        raise ConfigError("--shapes is of graphs, and this engine's is a language model's")
    return workloads(manifest, *of_tokens.values())


def _print(benchmark: "Benchmark") -> None:
    from trt_lora.scripts.measuring.workload import how_many

    facts = {"engine": benchmark.engine, "backend": benchmark.backend} | dict(benchmark.machine)
    print(", ".join(f"{label} {fact}" for label, fact in facts.items()))
    for times in benchmark.workloads:
        is_graph = not times.prompt_tokens
        units = ("run", "rows") if is_graph else ("token", "tokens")
        what = f"{times.prompt_tokens or 1} + {times.new_tokens} {units[0]}s"
        print(f"\n{how_many(times.rows, 'row')} of {what}, {how_many(times.rounds, 'round')}")
        print_table(_named(_TIMES, units), [_time_row(c) for c in times.contestants])
        if ratios := [_ratio_row(c, times.rounds) for c in times.contestants[1:]]:
            print()
            header = _RATIOS if times.rounds == 1 else _SPREADS
            print_table(_named(header, units), ratios)
            print(_spread_note(times.rounds))
    print()
    sizes = benchmark.memory_bytes.items()
    print_table(("memory", "size"), [(name, byte_size(nbytes)) for name, nbytes in sizes])


def _named(header: tuple[str, ...], units: tuple[str, str]) -> tuple[str, ...]:
    return tuple(label.format(*units) for label in header)


def _time_row(c: "VariantTimes") -> tuple[str, ...]:
    token = (f"{c.token_p50_ms:.2f}", f"{c.token_p90_ms:.2f}", f"{c.token_p99_ms:.2f}")
    return c.contestant, f"{c.first_token_ms:.1f}", *token, f"{c.tokens_per_second:.1f}"


def _ratio_row(c: "VariantTimes", rounds: int) -> tuple[str, ...]:
    first, token = f"{c.first_token_ratio:.2f}", f"{c.token_ratio:.2f}"
    if rounds == 1:
        return c.contestant, first, token
    firsts = f"{c.first_token_ratio_min:.2f} to {c.first_token_ratio_max:.2f}"
    return c.contestant, first, firsts, token, f"{c.token_ratio_min:.2f} to {c.token_ratio_max:.2f}"


def _spread_note(rounds: int) -> str:
    if rounds == 1:
        return f"one round: no spread, and a ratio may be noise; --rounds {ROUNDS} shows it"
    return "medians of the rounds; a wide min to max means a busy machine, not a slow adapter"
