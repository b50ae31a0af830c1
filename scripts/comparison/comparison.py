"""Run the polygraphy commands of a comparison, adapter by adapter."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_lora.runtime.adapters.fitting.coverage import SiteCoverage
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE
from trt_lora.scripts.comparison.bisect import SiteFault, first_fault
from trt_lora.scripts.comparison.comparison_setup import ComparisonSetup
from trt_lora.scripts.comparison.files import load_accuracy, load_outputs, same_outputs
from trt_lora.scripts.comparison.references import ENGINE, ComparisonCase, run_model, write_variant
from trt_lora.scripts.comparison.report import (
    ComparisonRow,
    compared_row,
    file_hashes,
    report,
    write_commands,
)
from trt_lora.scripts.comparison.shell_commands import Command, run_command
from trt_lora.scripts.terminal.stage_progress import TurnProgress

BASE_CASE = "base"  # how files and tables call the base model


@dataclass
class Comparison:
    """One engine, one reference, and the commands that compare them, in one folder."""

    setup: ComparisonSetup
    adapters: dict[str, Path]
    folder: Path
    limit: float  # absolute error of an output
    bisect: bool = False
    keep_models: bool = False
    commands: dict[str, list[Command]] = field(default_factory=dict)  # that ran, by case

    @property
    def cases(self) -> list[ComparisonCase]:
        """The base model and every adapter."""
        numbered = enumerate(self.adapters, start=1)
        return [
            ComparisonCase(BASE_CASE),
            *(ComparisonCase(name, f"$ADAPTER_{n}") for n, name in numbered),
        ]

    @property
    def places(self) -> dict[str, Path]:
        """Paths of the places in commands."""
        numbered = enumerate(self.adapters.values(), start=1)
        return self.setup.places | {f"ADAPTER_{n}": path.resolve() for n, path in numbered}

    def run(self, progress: TurnProgress) -> list[ComparisonRow]:
        """Run every case, each a stage; the commands are kept whatever happens."""
        try:
            return [self._row(case, progress) for case in self.cases]
        finally:
            write_commands(self.commands, self.places, self.folder)
            self._remove_models("models", "models.other")

    def _row(self, case: ComparisonCase, progress: TurnProgress) -> ComparisonRow:
        reference = self.setup.reference
        progress.stage(f"{case.name}: {reference.engine_runner[2:]} vs {reference.name}")
        commands = (*reference.commands(case), *self._engine_commands(case))
        for done, command in enumerate(commands):
            said = f"{case.name}: command {done + 1} of {len(commands)}"
            progress.turn(said, done, len(commands))
            self._run(case, command)
        accuracy = load_accuracy(self.folder / case.accuracy)
        row = compared_row(accuracy, reference, self.setup.manifest, case.name)
        if self.bisect and not row.same:
            progress.stage(f"{case.name}: bisect")
            row = replace(row, site=self._first_fault(case), bisected=True)
        return row

    def idle_adapters(self) -> list[str]:
        """Return the adapters with which the engine answers as without."""
        outputs = {case.name: self.folder / case.outputs("engine") for case in self.cases}
        base = load_outputs(outputs.pop(BASE_CASE)) if self.adapters else []
        return [name for name, path in outputs.items() if same_outputs(base, load_outputs(path))]

    def _engine_commands(self, case: ComparisonCase) -> list[Command]:
        reference, runs_plan = self.setup.reference, self.setup.runs_plan
        model = f"{ENGINE}/{ONNX_FILE}" if runs_plan else case.model("engine", sites=False)
        command = run_model(
            model,
            reference.engine_runner,
            case.inputs,
            *("--load-outputs", case.outputs(reference.name)),
            *("--atol", f"{self.limit:g}", "--rtol", f"{self.limit / 10:g}"),
            outputs=case.outputs("engine"),
        )
        variant = [] if runs_plan else [write_variant(case, "engine", sites=False)]
        return [*variant, Command((*command.words, "--save-accuracy-results", case.accuracy))]

    def _first_fault(self, case: ComparisonCase) -> SiteFault | None:
        model = case.model("engine", sites=True)
        outputs = {n: case.outputs(n, sites=True) for n in ("engine", self.setup.reference.name)}
        self._run(case, write_variant(case, "engine", sites=True))
        self._run(case, run_model(model, "--onnxrt", case.inputs, outputs=outputs["engine"]))
        for command in self.setup.reference.commands(case, sites=True):
            self._run(case, command)
        engine, reference = (load_outputs(self.folder / path) for path in outputs.values())
        manifest, sites = self.setup.manifest, self._coverage(case)
        fault = first_fault(engine, reference, manifest, sites, self.limit / 10)
        self._remove_models("sites")
        return fault

    def _coverage(self, case: ComparisonCase) -> tuple[SiteCoverage, ...]:
        if case.name not in self.adapters:
            return ()
        manifest = self.setup.manifest
        adapter = load_adapter(self.adapters[case.name], manifest)
        return fit_adapter(adapter, manifest, directory=self.setup.places["ENGINE"]).coverage.sites

    def _run(self, case: ComparisonCase, command: Command) -> None:
        if any(command in ran for ran in self.commands.values()):
            return  # a model that serves every case
        self.commands.setdefault(case.name, []).append(command)
        log = Path("logs", f"{case.name}.txt")
        run_command(command, self.folder, self.places, log)

    def _remove_models(self, *folders: str) -> None:
        for folder in () if self.keep_models else folders:
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def report(self, rows: list[ComparisonRow]) -> dict[str, Any]:
        """Return all that the folder's report says; copy the manifest beside it."""
        engine = self.setup.places["ENGINE"]
        shutil.copyfile(engine / MANIFEST_FILE, self.folder / MANIFEST_FILE)
        facts = {
            "against": self.setup.reference.name,
            "note": self.setup.reference.note,
            "places": {name: str(path) for name, path in self.places.items()},
            "adapters": {name: file_hashes(path) for name, path in self.adapters.items()},
            "tolerance": {"absolute": self.limit, "relative": self.limit / 10},
            "folder": str(self.folder),
        }
        return report(rows, facts)
