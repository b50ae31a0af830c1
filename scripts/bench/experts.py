"""A decode step of a random mixture of experts beside a dense model of what a token takes of it.

32 experts, 4 of them for a token; engines are built once, into `engines/experts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.builder import BuildConfig
from trt_lora.plugins.contract.sites import FACTORS
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Weight, weight_of
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.scripts.bench.codes import CONTEXT, ROUNDS, TOKENS, started, step_ms
from trt_lora.scripts.demo.__main__ import ensure_engine
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import alternate
from trt_lora.scripts.terminal.build_progress import build_progress

FOLDER = Path("engines/experts")
WIDTH, INNER, LAYERS, EXPERTS, TOP, RANK = 1024, 1024, 2, 32, 4, 8
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_dense")
_MIXTURE = {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
DENSE, PLAIN, ADAPTED = "dense", "experts", "experts with LoRA inputs"
# The architecture, its fields, and what takes LoRA.
VERSIONS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    DENSE: ("Qwen3", {}, _ATTENTION),
    PLAIN: ("Qwen3Moe", _MIXTURE, _ATTENTION),
    ADAPTED: ("Qwen3Moe", _MIXTURE, (*_ATTENTION, "moe_gate_up", "moe_4h_to_h")),
}


def rows() -> Iterator[ResultRow]:
    """Compare steps of one row, without an adapter and with one of all that takes LoRA."""
    directories = {name: _built(name) for name in VERSIONS}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(open_engine(directory, "onnxruntime"))
            for name, directory in directories.items()
        }
        for engine in engines.values():
            engine.adapters.add("a", _random_adapter(engine))
        for adapter in (None, "a"):
            yield from _steps(engines, adapter)


def _built(name: str) -> Path:
    architecture, fields, targets = VERSIONS[name]
    model = _saved(architecture, fields)
    options: dict[str, Any] = {"dtype": "float32", "flavour": "none", "max_lora_rank": RANK}
    options |= {"max_input_len": 2 * CONTEXT, "target_modules": targets}
    config = BuildConfig(model, FOLDER / name.replace(" ", "-"), **options)
    with build_progress() as progress:
        ensure_engine(config, progress)
    return config.output


def _saved(architecture: str, fields: Mapping[str, Any]) -> Path:
    import transformers

    folder = FOLDER / architecture
    if not (folder / "config.json").exists():
        config = getattr(transformers, f"{architecture}Config")(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=TOP * INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            **fields,
        )
        getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    return folder


def _random_adapter(engine: Engine) -> Adapter:
    rng, names = np.random.default_rng(0), engine.manifest.binding_names
    weights = dict[str, Weight]()
    for site in engine.manifest.sites:
        for factor in FACTORS:
            values = rng.standard_normal(site.shape(factor, RANK), np.float32) / 50
            name = names.binding(factor, site.path)
            weights[name] = weight_of(name, tensor_from_numpy(values))
    return Adapter("random", weights)


def _steps(engines: Mapping[str, Engine], adapter: str | None) -> Iterator[ResultRow]:
    decoders = {name: started(engine, adapter, 1) for name, engine in engines.items()}

    def sample(order: Sequence[str]) -> list[float]:
        return [step_ms(decoders[name], 1) for name in order]

    times = alternate(list(decoders), sample, ROUNDS, warm_up=1)
    for name in decoders:
        yield ResultRow(
            f"decode, {name}, {'with' if adapter else 'without'} an adapter",
            {"context": CONTEXT, "tokens": TOKENS, "rounds": ROUNDS},
            {"tokens/s": 1e3 / times.median(name)},
            {"step / dense": times.ratio(name, DENSE)},
        )
