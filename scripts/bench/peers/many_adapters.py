"""Decode 8 rows with 1, 4 and 8 adapters: in one batch, one adapter after another, and in PEFT.

    python -m trt_lora.scripts.bench.peers.many_adapters MODEL FOLDER ADAPTER

Run by cpu.py. ADAPTER gives the sizes: its copies with other values are the other adapters. Prints
tokens/s of all rows as JSON. All take turns, and the medians are compared.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.runtime import LoRAManager, SamplingParams, Scheduler, SlotAdapters, open_engine
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.scripts.measuring.seconds import seconds_of

ROWS, PROMPT, STEPS, ROUNDS = 8, 32, 16, 5
COUNTS = (1, 4, 8)  # of adapters among the rows
_SAMPLING = SamplingParams(max_tokens=STEPS + 2, ignore_eos=True, temperature=0)


def make_adapters(adapter: Path, folder: Path) -> dict[str, Path]:
    """Write `ROWS` adapters of the sizes of one."""
    made = {}
    for number in range(ROWS):
        path = folder / f"a{number}"
        shutil.copytree(adapter, path)
        tensors = load_file(path / WEIGHTS_FILE)
        rng = np.random.default_rng(number)
        save_file({n: rng.permutation(t) for n, t in tensors.items()}, path / WEIGHTS_FILE)
        made[path.name] = path
    return made


def names_of(count: int) -> list[str]:
    """The adapter of each row, where there are `count`."""
    return [f"a{row % count}" for row in range(ROWS)]


def decode_seconds(batch: Scheduler, rows: list[str | None]) -> float:
    """Seconds of `STEPS` steps of sequences, behind their prompts."""
    rng = np.random.default_rng(0)
    for name in rows:
        batch.submit(rng.integers(100, 40_000, PROMPT).tolist(), _SAMPLING, adapter=name)
    batch.step()
    seconds = seconds_of(lambda: [batch.step() for _ in range(STEPS)]).wall
    batch.clear()
    return seconds


class PeftRows:
    """All adapters in one model of transformers, chosen by row."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel

        untyped: Any = AutoModelForCausalLM
        self._model: Any = untyped.from_pretrained(model, attn_implementation="sdpa")
        (first, path), *others = adapters.items()
        self._model = PeftModel.from_pretrained(self._model, path, adapter_name=first).eval()
        for name, path in others:
            self._model.load_adapter(path, adapter_name=name)

    @torch.inference_mode()
    def seconds(self, names: list[str]) -> float:
        """The same steps."""
        cache, ids = DynamicCache(), np.random.default_rng(0).integers(100, 40_000, (ROWS, PROMPT))
        tokens = torch.from_numpy(ids)

        def run(count: int) -> None:
            nonlocal tokens
            for _ in range(count):
                out = self._model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, adapter_names=names
                )
                tokens = out.logits[:, -1:].argmax(-1)

        run(1)
        return seconds_of(lambda: run(STEPS)).wall


def measure(model: Path, folder: Path, adapter: Path) -> dict[str, float]:
    """Build both engines and measure; tokens/s."""
    adapters = make_adapters(adapter, folder)
    shared: dict[str, Any] = {"flavour": "none", "dtype": "float32", "lora_dirs": (adapter,)}
    build_engine(BuildConfig(model, folder / "single", **shared))
    build_engine(BuildConfig(model, folder / "slots", **shared, max_loras=ROWS))
    peft = PeftRows(model, adapters)
    with open_engine(folder / "single") as single, open_engine(folder / "slots") as slots:
        manager, own = LoRAManager(), SlotAdapters(slots)
        manager.initialize_engine_bindings(single)
        for name, path in adapters.items():
            manager.load_weights(name, path)
            own.load_weights(name, path)
        alone, together = Scheduler(single, manager=manager), Scheduler(slots, adapters=own)

        def one_after_another(names: list[str]) -> float:
            seconds = 0.0
            for name in dict.fromkeys(names):
                manager.switch_weights(name)
                alone.use_active_adapter()
                seconds += decode_seconds(alone, [None] * names.count(name))
            return seconds

        ways: dict[str, Callable[[list[str]], float]] = {
            "in one batch": lambda names: decode_seconds(together, list(names)),
            "one adapter after another": one_after_another,
            "transformers + PEFT": peft.seconds,
        }
        found = {name: ROWS * STEPS / median for name, median in _medians(ways).items()}
    one, *more = (f"{count} adapters, in one batch" for count in COUNTS)
    return found | {f"{name}, against 1": found[name] / found[one] for name in more}


def _medians(ways: dict[str, Callable[[list[str]], float]]) -> dict[str, float]:
    """Median seconds of each way and count, all in turns, after a round that is not counted."""
    runs = {
        f"{count} adapters, {way}": partial(run, names_of(count))
        for count in COUNTS
        for way, run in ways.items()
    }
    rounds = [{name: run() for name, run in runs.items()} for _ in range(ROUNDS + 1)][1:]
    return {name: statistics.median(one[name] for one in rounds) for name in runs}


if __name__ == "__main__":
    print(json.dumps(measure(*map(Path, sys.argv[1:]))))
