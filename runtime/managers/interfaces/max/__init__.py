"""MAX's `LoRAManager` over `SlotAdapters`, by MAX's own names."""

from trt_lora.runtime.managers.interfaces.max.config import MaxLoRAConfig as LoRAConfig
from trt_lora.runtime.managers.interfaces.max.manager import MaxLoRAManager as LoRAManager
from trt_lora.runtime.managers.interfaces.max.status import LoRAOperation, LoRAOutcome, LoRAStatus

__all__ = ["LoRAConfig", "LoRAManager", "LoRAOperation", "LoRAOutcome", "LoRAStatus"]
