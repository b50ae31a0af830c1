"""Managers take torch tensors in place: an adapter of the engine's dtype is not copied."""

import numpy as np
import pytest
import torch
from support.adapters.blended_adapters import assert_near, delta, product, random_pair
from support.adapters.manager_setup import ANY, SITE, A, B, manager_with, refreshed
from support.adapters.many_adapters import MANIFEST, slot_adapters
from support.adapters.trtllm_files import factors, rows_of
from support.fakes.adapter_files import stacks_of
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.interfaces.trtllm import LoraCacheOptions, PeftCacheManager, TrtllmLoraRequest

pytestmark = pytest.mark.needs_torch

K, N = 8, 6  # of every site
ATTN_Q = 1  # TensorRT-LLM's id


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_a_torch_tensor_is_registered_in_place(dtype: str, torch_dtype: torch.dtype) -> None:
    weights = {A: torch.randn(8, 2).to(torch_dtype), B: torch.randn(2, 6).to(torch_dtype)}
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(dtype=dtype)))
    manager.add_weights("a", weights)
    manager.switch_weights("a")
    bound = refreshed(manager)
    for name, tensor in weights.items():
        assert (bound[name].pointer, bound[name].dtype) == (tensor.data_ptr(), dtype)
        np.testing.assert_array_equal(bound[name].numpy(), tensor.float().numpy())


def test_a_strength_of_torch_tensors_has_memory_of_its_own_and_leaves_them_as_they_are() -> None:
    weights = {name: torch.from_numpy(array) for name, array in random_pair(0).items()}
    manager = manager_with(a=weights)
    manager.switch_weights("a", scale=2)
    assert manager.get_active_weight(B).pointer != weights[B].data_ptr()
    torch.testing.assert_close(weights[B], torch.from_numpy(random_pair(0)[B]), rtol=0, atol=0)
    assert_near(delta(manager, SITE), 2 * product(random_pair(0)))


def test_trtllm_weights_may_be_torch_tensors() -> None:
    a, b = factors(2, K, N)
    weights, config = (
        torch.from_numpy(rows_of([(a, b)])),
        torch.tensor([[ATTN_Q, 0, 2]], dtype=torch.int32),
    )
    tasks = PeftCacheManager(slot_adapters(LoraCacheOptions().store_config(MANIFEST)))
    lease = tasks.add_request_peft(TrtllmLoraRequest(7, weights.to(torch.bfloat16), config))
    assert lease is not None
    tasks.adapters.bindings.activate(lease)
    stacks = stacks_of(tasks.adapters).views(0, 1)
    in_slot = {name: stack.numpy()[0].astype(np.float64) for name, stack in stacks.items()}
    expected = b.astype(np.float64) @ a
    np.testing.assert_array_equal(in_slot[ANY] @ in_slot[ANY.replace("_A_", "_B_")], expected.T)
