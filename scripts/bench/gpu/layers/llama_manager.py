"""LoRA manager of an engine of Llama-3-8B's shapes, to move adapters without running it.

Nothing of the builder is imported here: a machine with a GPU need not have what builds a model.
"""

from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.manifest import BaseModel, Manifest
from trt_lora.runtime.memory.host import Memory
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class OnDevice:
    """All that a manager asks of an executor before it runs."""

    manifest: Manifest
    memory: Memory
    rank_multiple: int = 1
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    def release_inputs(self) -> None:
        """Nothing has run."""

    def execute(self, tensor_map: object) -> Any:
        """Nothing is run here."""
        raise NotImplementedError


def site_path(layer: int, linear: str) -> str:
    """Return the path of a linear in the model."""
    return f"model.layers.{layer}.{MODULES[linear]}"


def llama_manifest(dtype: str) -> Manifest:
    """Return a manifest with the seven linears of 32 layers: 448 bindings."""
    sites = tuple(
        Site(site_path(layer, linear.name), linear.k, linear.n, dtype)
        for layer in range(LLAMA_3_8B.layers)
        for linear in LLAMA_3_8B.linears
    )
    base = BaseModel("Llama-3-8B", "LlamaForCausalLM", "", (), 0, 128)
    return Manifest(
        base, BindingNames.LORA, sites, (), (), {},
        max_batch_size=1, max_input_len=1, max_seq_len=2, max_lora_rank=512, opt_lora_rank=16,
        dtype=dtype, flavour="none", versions={}, files={},
    )  # fmt: skip


def manager_of(memory: Memory, dtype: str) -> LoRAManager:
    """Return a manager without adapters, whose tensors will lie in `memory`."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(OnDevice(llama_manifest(dtype), memory))
    return manager
