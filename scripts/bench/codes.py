"""Weights in codes beside floats: size, distance from the float model, and a decode step.

The demo's model and adapters; engines are built once, into `engines/codes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from trt_lora.builder import BuildConfig
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE
from trt_lora.scripts.demo.__main__ import ADAPTERS, ensure_engine
from trt_lora.scripts.demo.model import DEFAULT_DIRECTORY, ensure_demo_model
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import alternate
from trt_lora.scripts.terminal.build_progress import build_progress
from trt_lora.scripts.verification.accuracy import accuracy, text_windows
from trt_lora.scripts.verification.peft_reference import PeftReference

FOLDER = Path("engines/codes")
FLOAT = "float32"
VERSIONS: Mapping[str, Mapping[str, Any]] = {
    FLOAT: {},
    "int8": {"quantize": "int8"},
    "int8-exact": {"quantize": "int8", "quantize_level": "exact"},
    "int4": {"quantize": "int4"},
    "int4-exact": {"quantize": "int4", "quantize_level": "exact"},
}
ADAPTER = "json"  # in all seven linears of a layer
ROWS, CONTEXT, TOKENS, ROUNDS = (1, 8), 64, 24, 6


def rows() -> Iterator[ResultRow]:
    """Compare every version with the float model, then with one another in turns."""
    model = ensure_demo_model(DEFAULT_DIRECTORY)
    paths = {path.name: path for path in sorted(ADAPTERS.iterdir())}
    directories = {name: _built(model, name) for name in VERSIONS}
    reference = PeftReference(model, paths, attention="sdpa")
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(open_engine(directory, "onnxruntime"))
            for name, directory in directories.items()
        }
        for engine in engines.values():
            for adapter, path in paths.items():
                engine.adapters.load(adapter, path)
        for name, engine in engines.items():
            yield from _distances(name, engine, reference, paths)
        for count in ROWS:
            yield from _steps(engines, count)


def _built(model: Path, name: str) -> Path:
    options: dict[str, Any] = {"dtype": FLOAT, "flavour": "none", "target_modules": ("all-linear",)}
    config = BuildConfig(model, FOLDER / name, **options, **VERSIONS[name])
    with build_progress() as progress:
        ensure_engine(config, progress)
    return config.output


def _distances(
    name: str, engine: Engine, reference: PeftReference, adapters: Mapping[str, Path]
) -> Iterator[ResultRow]:
    size = engine.manifest.files[ONNX_WEIGHTS_FILE].size_bytes
    for adapter in ("", *adapters):
        found = accuracy(engine, adapter, reference, text_windows(engine, None))
        yield ResultRow(
            f"{name}, {adapter or 'base'}",
            {"tokens": found.tokens, "weights, MB": size / 1e6},
            {"perplexity": found.perplexity, "of the float model": found.float_perplexity},
            {"KL": found.divergence, "same best token": found.same_best},
        )


def _steps(engines: Mapping[str, Engine], count: int) -> Iterator[ResultRow]:
    """Decode steps of `count` rows, with an adapter and without."""
    decoders = {
        (name, adapter): started(engine, adapter, count)
        for name, engine in engines.items()
        for adapter in (ADAPTER, None)
    }
    labels = {f"{name}, {adapter or 'base'}": key for key in decoders for name, adapter in [key]}

    def sample(order: Sequence[str]) -> list[float]:
        return [step_ms(decoders[labels[label]], count) for label in order]

    times = alternate(list(labels), sample, ROUNDS, warm_up=1)
    for label in labels:
        name, base = labels[label][0], f"{FLOAT}, {label.partition(', ')[2]}"
        ratios = {f"speed / {base}": times.ratio(base, label)}
        if labels[label][1]:
            ratios["step / without an adapter"] = times.ratio(label, f"{name}, base")
        yield ResultRow(
            f"decode, {count} rows, {label}",
            {"rows": count, "context": CONTEXT, "rounds": ROUNDS},
            {"tokens/s": count * 1e3 / times.median(label)},
            ratios,
        )


def started(engine: Engine, adapter: str | None, count: int) -> StaticDecoder:
    """Return a decoder with a prompt in every row."""
    decoder = StaticDecoder(engine, engine.adapters.bindings.rows([adapter]), count)
    prompt = np.arange(1, CONTEXT + 1)[None]
    for row in range(count):
        decoder.cache.admit(row)
        decoder.run(prompt, first=row, kept=np.array([CONTEXT - 1]))
    return decoder


def step_ms(decoder: StaticDecoder, count: int) -> float:
    """Return the milliseconds of a decode step of `count` rows, over `TOKENS` steps."""
    begin = perf_counter()
    for _ in range(TOKENS):
        decoder.decode(np.full(count, 5))
    return (perf_counter() - begin) * 1e3 / TOKENS
