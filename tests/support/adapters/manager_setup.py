"""Managers on a fake engine, and what can be asked of them."""

from collections.abc import Mapping

import numpy as np
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

MANIFEST = make_manifest()
BINDINGS = list(MANIFEST.lora_bindings)
SITE = "model.layers.1.self_attn.v_proj"  # the only one that the partial adapters have
A, B = f"lora_A_{SITE}", f"lora_B_{SITE}"
ANY = "lora_A_model.layers.0.self_attn.q_proj"


def pair(rank: int = 2, value: float = 1.0) -> dict[str, Array]:
    """Weights of one site."""
    return {A: np.full((8, rank), value, np.float32), B: np.full((rank, 6), value, np.float32)}


def manager_with(bound: bool = True, **adapters: Mapping[str, object]) -> LoRAManager:
    """Bound to a fake engine unless told otherwise, no adapter active."""
    manager = LoRAManager()
    if bound:
        manager.initialize_engine_bindings(FakeExecutor(MANIFEST))
    for name, weights in adapters.items():
        manager.add_weights(name, weights)
    return manager


def refreshed(manager: LoRAManager) -> TensorMap:
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def state_of(manager: LoRAManager) -> object:
    """All that can be asked of a manager that an engine is bound to."""
    return (
        manager.get_adapter_names(),
        manager.get_binding_names(),
        manager.get_active_adapter_name(),
        manager.has_active_adapter(),
        manager.has_weight_for(A),
        manager.has_weight_for(ANY),
        list(refreshed(manager).items()),  # Tensor compares by identity
    )


def assert_zero(tensor: Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.shape == shape
    np.testing.assert_array_equal(tensor.numpy(), np.zeros(shape))
