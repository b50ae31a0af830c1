"""Demo on a real model: answer as three adapters, and four prompts at once, in 32 and in 4 bits."""

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.config import FLAVOUR_CHOICES
from trt_lora.builder.progress import Progress
from trt_lora.builder.versions import tool_versions
from trt_lora.plugins.errors import ManifestError
from trt_lora.runtime import (
    Engine,
    LoRAManager,
    Manifest,
    SamplingParams,
    open_engine,
    read_manifest,
)
from trt_lora.runtime.memory.cuda import cuda_obstacle
from trt_lora.scripts.demo.model import ensure_demo_model
from trt_lora.scripts.terminal.adapters import BASE, timed_switch
from trt_lora.scripts.terminal.build_progress import BuildProgress, build_progress
from trt_lora.scripts.terminal.console import run

ENGINE = Path("engines/smollm2")
CODED = Path("engines/smollm2-int4")
ADAPTERS = Path("tests/adapters")
MODEL = Path("build/smollm2")
MODULES = (
    "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
)  # fmt: skip
WIDTH = 110  # columns that the tables need
PROMPTS = ("What is the capital of Portugal?", "Name a vegetable.", "What color is snow?")
BATCHED = (
    "Name a fruit.",
    "What is the capital of Portugal?",
    "I have been thinking about winter holidays for a while. What color is snow?",
    "A friend of mine grows vegetables in a small garden behind her house. Name one vegetable.",
)
SAMPLING = SamplingParams(max_tokens=32, temperature=0)
NEXT = f"""
Now talk to it:

  .venv/bin/trt-lora chat {ENGINE} --adapter pirate={ADAPTERS}/pirate
"""


def main() -> None:
    """Run the demo in the current folder, a checkout of the project."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    told = "of the plan; auto: what is installed (default: auto where a GPU can run it, else none)"
    parser.add_argument("--flavour", choices=FLAVOUR_CHOICES, default=None, help=told)
    flavour = parser.parse_args().flavour
    run(lambda: demo(Console(width=max(Console().width, WIDTH)), flavour))


def demo(console: Console, flavour: str | None = None) -> None:
    """Build the engine if need be, print what it answers, and what to type next.

    Args:
        console: where it prints.
        flavour: of the plan; None: what is installed where a GPU can run it, else no plan.

    Raises:
        LoRAError: model, engine or an adapter cannot be made or read.
    """
    with build_progress() as progress:
        progress.stage("model")
        ensure_demo_model(MODEL)
        config = demo_config(_flavour(flavour, progress))
        manifest = ensure_engine(config, progress)
        coded = replace(config, output=CODED, quantize="int4", flavour="none")
        ensure_engine(coded, progress)
    with open_engine(ENGINE) as engine:
        where = type(engine.executor).__name__
        console.print(f"{ENGINE}: {len(manifest.sites)} LoRA sites, run by {where}")
        for path in sorted(ADAPTERS.iterdir()):
            engine.adapters.load(path.name, path)
        manager = LoRAManager(engine.adapters)
        table = Table("prompt", "active adapter", "answer", "switch (us)", show_lines=True)
        for prompt in PROMPTS:
            for name in [None, *engine.adapters.names]:
                microseconds = timed_switch(manager, name)
                answer = engine.generate(prompt, adapter=name, sampling=SAMPLING)
                table.add_row(prompt, name or BASE, answer.text.strip(), f"{microseconds:.0f}")
        console.print(table, markup=False)
        console.print(_in_one_batch(engine, f"in {manifest.dtype}, by {where}"), markup=False)
    with open_engine(CODED) as engine:
        engine.adapters.load(name := min(path.name for path in ADAPTERS.iterdir()), ADAPTERS / name)
        console.print(_in_one_batch(engine, "in int4, on the CPU"), markup=False)
    console.print(NEXT, markup=False, highlight=False, end="")


def demo_config(flavour: str) -> BuildConfig:
    """The README's `build-engine` command, with a plan of one of FLAVOUR_CHOICES."""
    return BuildConfig(MODEL, ENGINE, MODULES, dtype="float32", flavour=flavour)


def _flavour(wanted: str | None, progress: BuildProgress) -> str:
    """Say that there is no plan where none was asked for and nothing could run it."""
    if wanted is None and cuda_obstacle():
        progress.note("no GPU can be used here, so no plan is made (trt-lora doctor says why)")
        progress.note("make demo DEMO='--flavour tensorrt-rtx' makes one all the same")
        return "none"
    return wanted or "auto"


def _in_one_batch(engine: Engine, label: str) -> Table:
    """Answer prompts of different lengths together: each joins when the one before has begun."""
    adapter, scheduler, tokenizer = engine.adapters.names[0], engine.serve(), engine.tokenizer
    asked: dict[int, str] = {}
    answers: dict[int, list[int]] = {}
    steps, begin = 0, perf_counter()
    while scheduler or len(asked) < len(BATCHED):
        if len(asked) < len(BATCHED):
            prompt = BATCHED[len(asked)]
            row = scheduler.submit(prompt, SAMPLING, adapter=adapter)
            asked[row], answers[row] = prompt, []
        for token in scheduler.step().tokens.values():
            answers[token.sequence_id] += [token.token_id] if token.token_id is not None else []
        steps += 1
    speed = sum(map(len, answers.values())) / (perf_counter() - begin)
    title = f"{len(asked)} prompts in one batch {label}: {steps} steps, {speed:.0f} tokens/s"
    table = Table("prompt", "tokens", "answer", title=title, show_lines=True)
    for row, prompt in asked.items():
        tokens = str(len(tokenizer.encode(prompt)))
        table.add_row(prompt, tokens, tokenizer.decode(answers[row]).strip())
    return table


def ensure_engine(config: BuildConfig, progress: Progress) -> Manifest:
    """Reuse the engine of an earlier run, unless other tools or another release made it."""
    try:
        manifest = read_manifest(config.output)
    except ManifestError:
        manifest = None
    as_wished = manifest and (config.flavour == "none" or manifest.flavour != "none")
    if manifest and as_wished and tool_versions().items() <= manifest.versions.items():
        return manifest
    return build_engine(replace(config, force=True), progress)


if __name__ == "__main__":
    main()
