"""`trt-lora report`: an engine as one page of HTML: sites, adapters, kernels, sizes and times.

The page loads nothing from elsewhere and runs no script. Kernels and times are those of files, so
that a page is made in a second, on any machine:

    trt-lora inspect ENGINE --kernels --json > kernels.json
    trt-lora bench ENGINE --export bench.json
    trt-lora report ENGINE --kernels kernels.json --benchmarks bench.json --html report.html
"""

import argparse
from pathlib import Path

from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.scripts.terminal.adapters import adapter_paths, add_adapter_option, previewed
from trt_lora.scripts.terminal.printing import print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add_adapter_option(add)
    add("--html", type=Path, required=True, metavar="FILE", help="the page to write")
    add("--kernels", type=Path, metavar="FILE.json", help="what `inspect --kernels --json` printed")
    add("--benchmarks", type=Path, metavar="FILE.json", help="what `bench --export` wrote")
    add("--peers", type=Path, metavar="FILE.json", help="as docs/benchmarks/peers.json")
    add("--force", action="store_true", help="replace a file that is there")
    add("--json", action="store_true", help="print one JSON object about the page")
    parser.set_defaults(command=_report)


def _report(args: argparse.Namespace) -> None:
    # Not at the top: the help of a command is to come at once.
    from trt_lora.scripts.measuring.benchmark import read_benchmark
    from trt_lora.scripts.report.kernel_charts import kernel_charts
    from trt_lora.scripts.report.page import page_of
    from trt_lora.scripts.report.speed_charts import peer_charts

    if args.html.exists() and not args.force:
        raise ConfigError(f"{args.html} exists; choose another place, or pass --force")
    manifest = read_manifest(args.engine)
    page = page_of(
        args.engine,
        manifest,
        _coverages(args.adapter, manifest),
        kernels=kernel_charts(args.kernels, manifest) if args.kernels else (),
        benchmark=read_benchmark(args.benchmarks) if args.benchmarks else None,
        peers=peer_charts(args.peers) if args.peers else (),
    )
    html = page.html()
    with publish_file(args.html) as work:
        work.write_text(html, encoding="utf-8")
    taken = {section.name: section.coverage.is_taken for section in page.adapters}
    if args.json:
        print_json({"html": str(args.html), "adapters_taken": taken})
    else:
        print(f"{args.html}: {len(html)} characters; open it in any browser")


def _coverages(arguments: list[str], manifest: Manifest) -> dict[str, Coverage]:
    """What would become of every tensor; an adapter that the engine refuses is shown as well."""
    paths = adapter_paths(arguments)
    return {name: previewed(path, manifest) for name, path in paths.items()}
