"""`trt-lora verify`: compare an engine with transformers and PEFT, or with merged weights.

A graph, which has no model of transformers', is compared with its own ONNX file, the adapter merged
into its weights, on random inputs.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.manifest import GRAPH, ONNX_FILE, read_manifest, refuse_graph
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.answering_options import prompt_lines, read_text
from trt_lora.scripts.terminal.printing import print_json
from trt_lora.scripts.terminal.stage_progress import TurnProgress, stage_progress
from trt_lora.scripts.verification import deltas, graph_outputs, logits
from trt_lora.scripts.verification.accuracy import accuracy, print_accuracy, text_windows
from trt_lora.scripts.verification.tolerances import TOLERANCES, chosen_tolerance, tolerance_of

if TYPE_CHECKING:
    from trt_lora.scripts.verification.peft_reference import PeftReference

ADAPTER = "adapter"  # what the one adapter is called inside
_FLOAT = "float"  # of --reference
PROMPTS = ("Name a fruit.", "What is the capital of Portugal?", "Write one line about the sea.")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--model", type=Path, metavar="DIR", help="what it was made from; a graph needs none")
    add("--adapter", type=Path, required=True, metavar="PATH", help="a PEFT directory")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: three of its own)")
    add("--max-tokens", type=int, default=16, help="length of the answers compared")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    what = "PEFT on the weights as the engine has them, or on those of --model in float32: a report"
    add("--reference", choices=("engine", _FLOAT), default="engine", help=f"{what} (float)")
    add("--text", type=Path, metavar="FILE", help="for float (default: of Python's own reference)")
    add("--shapes", nargs="+", metavar="NAME=SIZE", help="of a graph: sizes, such as batch=2")
    what = "of a logit, or of a graph's largest value (default: by the engine's dtype)"
    add("--tolerance", type=float, help=what)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_verify)


class _Report(NamedTuple):
    """What was found of an engine and its reference."""

    problems: list[str]
    facts: dict[str, Any]  # for JSON
    print: Callable[[], None]
    verdict: str  # where there is no problem


def _verify(args: argparse.Namespace) -> None:
    """Print what was compared; exit with 1 beyond tolerance."""
    args.adapter = hub_path(args.adapter)
    is_graph = read_manifest(args.engine).kind == GRAPH
    (_check_graph if is_graph else _check_model)(args)
    with stage_progress() as progress, open_engine(args.engine, args.backend) as engine:
        runner = _runner(engine)
        progress.stage("adapter")
        problems = [] if is_graph else list(_other_base(engine, args.model))
        missing = engine.adapters.load(ADAPTER, args.adapter).missing_sites
        problems += [f"{path} is targeted, but has no tensors" for path in missing]
        verified = _accuracy if args.reference == _FLOAT else _comparison
        report = (_outputs if is_graph else verified)(args, engine, progress)
    problems += report.problems
    if args.json:
        print_json({"same": not problems, "ran_on": runner, "problems": problems} | report.facts)
    else:
        report.print()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    if not args.json:
        print(f"{report.verdict}: {args.adapter}; it ran on {runner}")


def _check_model(args: argparse.Namespace) -> None:
    """Refuse options that are not of a language model, and find its model."""
    refuse_encoder(read_manifest(args.engine), "trt-lora verify")
    if args.shapes:
        raise ConfigError("--shapes is of graphs, and this engine's is a language model's")
    if args.model is None:
        raise ConfigError("nothing says what the engine was made from; pass --model DIR")
    args.model = hub_path(args.model)
    if not args.model.is_dir():
        raise ConfigError(f"--model is {args.model}, which is not a directory")
    if args.text is not None and args.reference != _FLOAT:
        raise ConfigError("--text is of --reference float, which is not there; pass both, or none")
    with extra("peft", "verify"):  # it takes seconds, and nothing is computed before
        from trt_lora.scripts.verification.peft_reference import PeftReference  # noqa: F401


def _check_graph(args: argparse.Namespace) -> None:
    """Refuse options that are of language models alone."""
    manifest = read_manifest(args.engine)
    given = {"--model": args.model, "--prompts": args.prompts, "--text": args.text}
    given["--reference float"] = args.reference == _FLOAT or None
    for option in (option for option, value in given.items() if value is not None):
        refuse_graph(manifest, option, "trt-lora verify without it")
    if manifest.dtype == "bfloat16":
        raise ConfigError(
            "the engine is bfloat16, and its reference runs on ONNX Runtime, which has none on the "
            "CPU; verify one that is built with --dtype float32 or float16"
        )


def _outputs(args: argparse.Namespace, engine: Engine, progress: TurnProgress) -> _Report:
    """Outputs of a graph, beside those of merged weights."""
    from trt_lora.scripts.measuring.graph_inputs import random_inputs

    limit = chosen_tolerance(args.tolerance, TOLERANCES[engine.manifest.dtype].rtol)
    inputs = random_inputs(engine.manifest, args.shapes or ())
    progress.stage("outputs")
    rows = list(graph_outputs.compared_outputs(engine, ADAPTER, inputs))
    facts = {"tolerance": limit, "outputs": [dataclasses.asdict(row) for row in rows]}
    return _Report(
        graph_outputs.output_problems(rows, limit),
        facts,
        lambda: graph_outputs.print_outputs(rows),
        "the engine computes what its graph does with merged weights",
    )


def _comparison(args: argparse.Namespace, engine: Engine, progress: TurnProgress) -> _Report:
    """Logits and deltas, which rounding alone may move."""
    tolerance = tolerance_of(engine.manifest)
    limit = chosen_tolerance(args.tolerance, tolerance.logit)
    prompts = _prompts(args, engine)
    progress.stage("reference")
    weights = _weights(engine) if engine.manifest.weights else {}
    reference = _reference(args, engine.manifest.dtype, weights)
    progress.stage("logits")
    rows = list(
        logits.compared_logits(engine, ADAPTER, reference, prompts, args.max_tokens, progress.turn)
    )
    progress.stage("deltas")
    ours = deltas.engine_factors(engine.adapters, ADAPTER)
    errors = deltas.delta_errors(ours, reference.factors(ADAPTER))
    problems = logits.logit_problems(rows, limit) + deltas.delta_problems(errors, tolerance.delta)
    if not any(map(deltas.delta_norm, ours.values())):
        problems.append("the adapter adds nothing at any site, so that nothing was verified")
    facts = {
        "tolerance": limit,
        "logits": [dataclasses.asdict(row) for row in rows],
        "delta_errors": errors,  # by site, relative to PEFT's
    }

    def show() -> None:
        logits.print_logits(rows)
        deltas.print_deltas(errors)

    verdict = "the engine computes what PEFT does"
    if tolerance.logit != TOLERANCES[engine.manifest.dtype].logit:
        verdict += f", to {limit:g} of a logit, since it takes x in 8 bits"
    return _Report(problems, facts, show, verdict)


def _accuracy(args: argparse.Namespace, engine: Engine, progress: TurnProgress) -> _Report:
    """Perplexity and divergence, which codes and dtype move; nothing is beyond a tolerance."""
    windows = text_windows(engine, None if args.text is None else read_text(args.text))
    progress.stage("reference")
    reference = _reference(args, "float32", {})
    progress.stage("accuracy")
    rows = [accuracy(engine, name, reference, windows) for name in ("", ADAPTER)]
    facts = {"accuracy": [dataclasses.asdict(row) for row in rows]}
    return _Report([], facts, lambda: print_accuracy(rows), "the engine beside its float model")


def _reference(
    args: argparse.Namespace, dtype: str, weights: Mapping[str, Array]
) -> "PeftReference":
    from trt_lora.scripts.verification.peft_reference import PeftReference

    with _peft_errors(args.model, args.adapter):
        return PeftReference(args.model, {ADAPTER: args.adapter}, dtype, weights=weights)


def _weights(engine: Engine) -> dict[str, Array]:
    """The weights that the engine's codes are."""
    import onnx_ir as ir

    from trt_lora.builder.passes.codes.coded_weight import coded_weights

    model, found = ir.load(engine.directory / ONNX_FILE), dict[str, Array]()
    for path, weight in coded_weights(model):
        found[path] = weight.dequantised()
        if embedding := engine.manifest.weights[path].embedding:
            found[embedding] = found[path]
    return found


def _runner(engine: Engine) -> str:
    if engine.memory.device == HOST:
        return "ONNX Runtime (CPU)"
    return f"{engine.manifest.flavour} (GPU)"


@contextmanager
def _peft_errors(model: Path, adapter: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"PEFT cannot load {adapter} on {model}: {error}") from error


def _other_base(engine: Engine, model: Path) -> Iterator[str]:
    from trt_lora.builder.checkpoint.base_model import fingerprint
    from trt_lora.builder.checkpoint.checkpoint import Checkpoint

    built_from, given = engine.manifest.base_model, fingerprint(Checkpoint(model))
    if given != built_from.fingerprint:
        yield (
            f"{model} is not what the engine was built from: its fingerprint is {given}, that of "
            f"{built_from.name} {built_from.fingerprint}"
        )


def _prompts(args: argparse.Namespace, engine: Engine) -> list[str]:
    if not logits.has_tokenizer(engine):
        return [f"random ids {number} (no tokenizer)" for number in range(len(PROMPTS))]
    if args.prompts is None:
        return list(PROMPTS)
    return prompt_lines(args.prompts)
