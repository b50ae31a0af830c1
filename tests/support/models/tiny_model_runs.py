"""Runs of the tiny model of `fake_tensorrt`: adapters, inputs and expected answers."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from support.fakes.tiny_engine import DOWN, UP, expected_logits

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime import LoRAManager, TensorMap
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import token_inputs
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy

IDS = np.array([3, 1, 4, 1, 5])


def adapter(rank: int, *sites: Site) -> dict[str, Array]:
    """Return weights of some sites; the same for the same rank."""
    random = np.random.default_rng(rank)
    return {
        f"lora_{factor}_{site.path}": random.normal(
            size=site.shape("A" if factor == "A" else "B", rank)
        ).astype(np.float32)
        for site in sites
        for factor in "AB"
    }


NO_ADAPTER: dict[str, Array] = {}
FIRST, SECOND = adapter(3, UP, DOWN), adapter(2, DOWN)


def manager_of(engine: Executor, **adapters: Mapping[str, Array]) -> LoRAManager:
    """Return a manager of a running engine with adapters loaded."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name, weights in adapters.items():
        manager.add_weights(name, weights)
    return manager


def bindings_of(manager: LoRAManager, name: str = "") -> TensorMap:
    """Activate an adapter, or none; return its LoRA bindings."""
    manager.switch_weights(name) if name else manager.reset_weights()
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def prompt(engine: Executor, ids: npt.NDArray[np.int64] = IDS) -> TensorMap:
    """Return the inputs of a prefill, all on the host, without LoRA bindings."""
    tokens = step(ids, 0, kept=len(ids))
    return TensorMap({**tokens, **KVCache(engine.manifest, engine.memory, rows=1).views(0, 1)})


def step(
    ids: npt.NDArray[np.int64], length: int, kept: int = 1, bound: int = 0
) -> dict[str, Tensor]:
    """Return tokens on the host that follow `length` tokens of one row; the last have logits.

    `bound` is of the positions looked at; where it is 0, no more than there have to be.
    """
    places = np.arange(len(ids) - kept, len(ids))
    arrays = token_inputs(ids[None], np.array([length]), places, bound or length + len(ids))
    return {name: tensor_from_numpy(array) for name, array in arrays.items()}


def bound_prompt(engine: Executor) -> TensorMap:
    """Return the inputs of a prefill of the base model."""
    tensor_map = prompt(engine)
    manager_of(engine).refresh_tensor_map(tensor_map)
    return tensor_map


def logits_of(engine: Executor, tensor_map: TensorMap) -> Array:
    """Run the engine and return logits [s, vocab]."""
    logits: Array = engine.execute(tensor_map)["logits"].numpy()
    return logits


def close(actual: Array, weights: Mapping[str, Array], ids: npt.NDArray[np.int64] = IDS) -> bool:
    """Whether logits [s, vocab] are those of the base model with these weights."""
    return np.allclose(actual, expected_logits(ids, weights)[-len(actual) :], rtol=1e-4, atol=1e-4)


def expected_answer(
    prompt: Sequence[int], tokens: int, weights: Mapping[str, Array] = NO_ADAPTER
) -> list[int]:
    """Return the greedy answer: in float64, without a cache, and with no token to stop at."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(expected_logits(np.array(ids), weights)[-1].argmax()))
    return ids[len(prompt) :]
