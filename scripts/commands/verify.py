"""`trt-lora verify`: compare an engine with transformers and PEFT."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.answering_options import prompt_lines
from trt_lora.scripts.terminal.printing import print_json
from trt_lora.scripts.terminal.stage_progress import stage_progress
from trt_lora.scripts.verification import deltas, logits
from trt_lora.scripts.verification.tolerances import TOLERANCES, chosen_tolerance

ADAPTER = "adapter"  # what the one adapter is called inside
PROMPTS = ("Name a fruit.", "What is the capital of Portugal?", "Write one line about the sea.")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("--model", type=Path, required=True, metavar="DIR", help="what it was made from")
    add("--adapter", type=Path, required=True, metavar="PATH", help="a PEFT directory")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: three of its own)")
    add("--max-tokens", type=int, default=16, help="length of the answers compared")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add("--tolerance", type=float, help="of a logit (default: by the engine's dtype)")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_verify)


def _verify(args: argparse.Namespace) -> None:
    """Print two tables; exit with 1 beyond tolerance."""
    args.model, args.adapter = hub_path(args.model), hub_path(args.adapter)
    if not args.model.is_dir():
        raise ConfigError(f"--model is {args.model}, which is not a directory")
    with extra("peft", "verify"):  # it takes seconds, and nothing is computed before
        from trt_lora.scripts.verification.peft_reference import PeftReference
    problems: list[str] = []
    with stage_progress() as progress, open_engine(args.engine, args.backend) as engine:
        runner, tolerance = _runner(engine), TOLERANCES[engine.manifest.dtype]
        limit = chosen_tolerance(args.tolerance, tolerance.logit)
        progress.stage("adapter")
        problems += _other_base(engine, args.model)
        missing = engine.adapters.load(ADAPTER, args.adapter).missing_sites
        problems += [f"{path} is targeted, but has no tensors" for path in missing]
        prompts = _prompts(args, engine)
        progress.stage("reference")
        with _peft_errors(args.model, args.adapter):
            reference = PeftReference(args.model, {ADAPTER: args.adapter}, engine.manifest.dtype)
        progress.stage("logits")
        rows = list(
            logits.compared_logits(
                engine, ADAPTER, reference, prompts, args.max_tokens, progress.turn
            )
        )
        progress.stage("deltas")
        ours = deltas.engine_factors(engine.adapters, ADAPTER)
        errors = deltas.delta_errors(ours, reference.factors(ADAPTER))
    problems += logits.logit_problems(rows, limit)
    problems += deltas.delta_problems(errors, tolerance.delta)
    if not any(map(deltas.delta_norm, ours.values())):
        problems.append("the adapter adds nothing at any site, so that nothing was verified")
    if args.json:
        print_json(
            {
                "same": not problems,
                "ran_on": runner,
                "tolerance": limit,
                "problems": problems,
                "logits": [dataclasses.asdict(row) for row in rows],
                "delta_errors": errors,  # by site, relative to PEFT's
            }
        )
    else:
        logits.print_logits(rows)
        deltas.print_deltas(errors)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    if not args.json:
        print(f"the engine computes what PEFT does: {args.adapter}; it ran on {runner}")


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
