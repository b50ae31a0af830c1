"""`trt-lora compare`: an engine against another way to compute the same, by polygraphy.

The base model and every adapter are run on the same inputs, a step of prefill and one of decode, in
processes of polygraphy's own; every output is compared, the cache among them. The inputs, outputs
and commands are kept, so that anybody can run the comparison again. It exits with 1 if an output is
out of tolerance, and with 2 if the comparison cannot be made.
"""

import argparse
import json
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.coverage import SiteCoverage
from trt_lora.runtime.fit import fit_adapter
from trt_lora.runtime.load import load_adapter
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE
from trt_lora.scripts.adapter_arguments import name_and_path
from trt_lora.scripts.compare_bisect import SiteFault, first_fault
from trt_lora.scripts.compare_files import load_accuracy, load_outputs, same_outputs
from trt_lora.scripts.compare_inputs import Subjects, check_subjects, write_inputs
from trt_lora.scripts.compare_polygraphy import Command, require_tools, run_command
from trt_lora.scripts.compare_references import ENGINE, Case, Reference, run_model, write_variant
from trt_lora.scripts.compare_report import (
    Row,
    file_hashes,
    print_rows,
    report,
    write_commands,
    write_json,
)
from trt_lora.scripts.compare_runners import compared_row
from trt_lora.scripts.tolerances import chosen_tolerance

BASE_CASE = "base"  # how files and tables call the base model
DEFAULT_AGAINST = "merged"  # needs nothing but the engine, and shares the least with it


def add_command(subparsers: Any) -> None:
    """Add the subcommand to those of `trt-lora`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="an engine with adapters against merged weights, PEFT or another engine",
        description=__doc__,
    )
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--adapter", action="append", default=[], metavar="NAME=PATH", help="may be repeated")
    add(
        "--against",
        default=DEFAULT_AGAINST,
        metavar="WHAT",
        help="merged: the adapter merged into the weights (default); native: LoRA without the "
        "plugin on a GPU, in float64 elsewhere; peft: transformers and PEFT; or another engine",
    )
    add("--model", type=Path, metavar="DIR", help="what the engine was made from; for peft")
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
    subjects = check_subjects(args.engine, args.against, args.model, bisect=args.bisect)
    limit = chosen_tolerance(args.tolerance, subjects.tolerance)
    adapters = _adapters(args.adapter)
    folder = _folder(args.keep, args.engine, subjects.reference)
    comparison = Comparison(subjects, adapters, folder, limit, args.bisect, args.keep_models)
    write_inputs(subjects, comparison.cases, adapters, folder, args.prompt, args.seed)
    rows = comparison.run()
    found = comparison.report(rows)
    write_json(found, folder)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        if subjects.reference.note:
            print(subjects.reference.note)
        print_rows(rows)
        print(f"tolerance {limit:g}, relative {limit / 10:g}; kept in {folder}")
    idle = comparison.idle_adapters()
    for name in idle:
        print(f"error: {name} changes no output, so that nothing was compared", file=sys.stderr)
    if idle or not all(row.same for row in rows):
        sys.exit(1)


def _adapters(arguments: list[str]) -> dict[str, Path]:
    pairs = [name_and_path(text) for text in arguments]
    names = [name for name, _ in pairs]
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name) or name == BASE_CASE or names.count(name) > 1:
            raise ConfigError(
                f"--adapter names are {', '.join(names)}; give each a name of its own, of letters, "
                f"digits, '.', '_' and '-', and not {BASE_CASE!r}"
            )
    return dict(pairs)


def _folder(keep: Path | None, engine: Path, reference: Reference) -> Path:
    """The folder to keep everything in; it is made when there is something to write."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = keep or Path(f"compare-{engine.absolute().name}-{reference.name}-{stamp}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; give another folder to --keep")
    return folder


@dataclass
class Comparison:
    """One engine, one reference, and the commands that compare them, in one folder."""

    subjects: Subjects
    adapters: dict[str, Path]
    folder: Path
    limit: float  # absolute error of an output
    bisect: bool = False
    keep_models: bool = False
    commands: dict[str, list[Command]] = field(default_factory=dict)  # that ran, by case

    @property
    def cases(self) -> list[Case]:
        """The base model and every adapter."""
        numbered = enumerate(self.adapters, start=1)
        return [Case(BASE_CASE), *(Case(name, f"$ADAPTER_{n}") for n, name in numbered)]

    @property
    def places(self) -> dict[str, Path]:
        """What the places in commands stand for."""
        numbered = enumerate(self.adapters.values(), start=1)
        return self.subjects.places | {f"ADAPTER_{n}": path.resolve() for n, path in numbered}

    def run(self) -> list[Row]:
        """Run every case, one after the other; the commands are kept whatever happens."""
        try:
            return [self._row(case) for case in self.cases]
        finally:
            write_commands(self.commands, self.places, self.folder)
            self._remove_models("models", "models.other")

    def _row(self, case: Case) -> Row:
        reference = self.subjects.reference
        print(f"{case.name}: {reference.engine_runner[2:]} vs {reference.name}", file=sys.stderr)
        for command in reference.commands(case):
            self._run(case, command)
        self._run(case, self._engine_command(case))
        accuracy = load_accuracy(self.folder / case.accuracy)
        row = compared_row(accuracy, reference, self.subjects.manifest, case.name)
        if self.bisect and not row.same:
            row = replace(row, site=self._first_fault(case), bisected=True)
        return row

    def idle_adapters(self) -> list[str]:
        """Return the adapters with which the engine answers as without."""
        outputs = {case.name: self.folder / case.outputs("engine") for case in self.cases}
        base = load_outputs(outputs.pop(BASE_CASE)) if self.adapters else []
        return [name for name, path in outputs.items() if same_outputs(base, load_outputs(path))]

    def _engine_command(self, case: Case) -> Command:
        reference = self.subjects.reference
        command = run_model(
            f"{ENGINE}/{ONNX_FILE}",
            reference.engine_runner,
            case.inputs,
            *("--load-outputs", case.outputs(reference.name)),
            *("--atol", f"{self.limit:g}", "--rtol", f"{self.limit / 10:g}"),
            outputs=case.outputs("engine"),
        )
        return Command((*command.words, "--save-accuracy-results", case.accuracy))

    def _first_fault(self, case: Case) -> SiteFault | None:
        model = case.model("engine", sites=True)
        outputs = {n: case.outputs(n, sites=True) for n in ("engine", self.subjects.reference.name)}
        self._run(case, write_variant(case, "engine", sites=True))
        self._run(case, run_model(model, "--onnxrt", case.inputs, outputs=outputs["engine"]))
        for command in self.subjects.reference.commands(case, sites=True):
            self._run(case, command)
        engine, reference = (load_outputs(self.folder / path) for path in outputs.values())
        manifest, sites = self.subjects.manifest, self._coverage(case)
        fault = first_fault(engine, reference, manifest, sites, self.limit / 10)
        self._remove_models("sites", "models", "models.other")
        return fault

    def _coverage(self, case: Case) -> tuple[SiteCoverage, ...]:
        if case.name not in self.adapters:
            return ()
        manifest = self.subjects.manifest
        adapter = load_adapter(self.adapters[case.name], manifest)
        return fit_adapter(adapter, manifest).coverage.sites

    def _run(self, case: Case, command: Command) -> None:
        self.commands.setdefault(case.name, []).append(command)
        log = Path("logs", f"{case.name}.txt")
        run_command(command, self.folder, self.places, log)

    def _remove_models(self, *folders: str) -> None:
        for folder in () if self.keep_models else folders:
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def report(self, rows: list[Row]) -> dict[str, Any]:
        """Return all that the folder's report says; copy the manifest beside it."""
        engine = self.subjects.places["ENGINE"]
        shutil.copyfile(engine / MANIFEST_FILE, self.folder / MANIFEST_FILE)
        facts = {
            "against": self.subjects.reference.name,
            "note": self.subjects.reference.note,
            "places": {name: str(path) for name, path in self.places.items()},
            "adapters": {name: file_hashes(path) for name, path in self.adapters.items()},
            "tolerance": {"absolute": self.limit, "relative": self.limit / 10},
            "folder": str(self.folder),
        }
        return report(rows, facts)
