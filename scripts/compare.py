"""Compare an engine with transformers and PEFT: the same prompt, every position, every adapter."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Engine, LoRAManager, Sampling, TensorMap, generate, open_engine
from trt_lora.runtime.decoding import Decoder
from trt_lora.runtime.executor import BACKENDS
from trt_lora.runtime.text import TextTokenizer
from trt_lora.scripts.adapter_arguments import BASE, activate, load_adapters
from trt_lora.scripts.console import run
from trt_lora.scripts.peft_reference import PeftReference

# Largest difference of a logit that rounding explains, by the engine's dtype.
TOLERANCES = {"float32": 1e-3, "float16": 0.5, "bfloat16": 2.0}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit with 1 if a logit differs by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--engine", type=Path, required=True, metavar="DIR", help="what build-engine made")
    add("--model", type=Path, required=True, metavar="DIR", help="what it was made from")
    add("--adapter", action="append", default=[], metavar="NAME=PATH", help="a PEFT directory")
    add("--prompt", required=True, help="a user's message")
    add("--max-new-tokens", type=int, default=16, help="length of the answers compared")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    args = parser.parse_args(argv)
    run(lambda: _compare(args))


def _compare(args: argparse.Namespace) -> None:
    if not args.model.is_dir():
        raise ConfigError(f"--model is {args.model}, which is not a directory")
    table = Table("adapter", "positions", "max |error|", "mean |error|", "same best token")
    worst = 0.0
    with open_engine(args.engine, args.backend) as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        adapters = load_adapters(manager, args.adapter)
        reference = PeftReference(args.model, adapters, engine.manifest.dtype)
        for name in ["", *adapters]:
            ids = _prompt_and_answer(engine, manager, name, args.prompt, args.max_new_tokens)
            ours = engine_logits(engine, manager, name, ids, prompt=ids.shape[1] // 2)
            theirs = reference.logits(name, ids, np.ones_like(ids))
            error = np.abs(ours - theirs)
            same = (ours.argmax(-1) == theirs.argmax(-1)).mean()
            row = (f"{ids.size}", f"{error.max():.2e}", f"{error.mean():.2e}", f"{same:.1%}")
            table.add_row(name or BASE, *row)
            worst = float(np.maximum(worst, error.max()))  # NaN stays
        tolerance = TOLERANCES[engine.manifest.dtype]
    Console().print(table)
    if not worst <= tolerance:  # NaN is beyond it too
        print(f"error: {worst:.2e} is beyond the tolerance of {tolerance}", file=sys.stderr)
        sys.exit(1)


def _prompt_and_answer(
    engine: Engine, manager: LoRAManager, name: str, prompt: str, length: int
) -> npt.NDArray[np.int64]:
    """The prompt with the answer that the adapter gives to it, [1, s]."""
    activate(manager, name)
    (answer,) = generate(
        engine, [prompt], manager=manager, sampling=Sampling(max_new_tokens=length)
    )
    ids = [*TextTokenizer(engine.directory).encode(prompt), *answer.token_ids]
    return np.array([ids], np.int64)


def engine_logits(
    engine: Engine,
    manager: LoRAManager,
    name: str,
    ids: npt.NDArray[np.int64],
    *,
    prompt: int,
) -> npt.NDArray[np.float32]:
    """Return logits [batch, s, vocab] of ids [batch, s].

    The first `prompt` positions go through prefill, the others one by one through decode.
    """
    activate(manager, name)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    decoder = Decoder(engine, tensor_map, len(ids))
    columns = np.split(ids, range(prompt, ids.shape[1]), axis=1)
    steps = [decoder.step(part, np.ones_like(part), keep=part.shape[1]) for part in columns]
    return np.concatenate(steps, axis=1)


if __name__ == "__main__":
    main()
