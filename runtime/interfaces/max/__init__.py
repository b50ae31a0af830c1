"""MAX's `LoRAManager` over `AdapterStore`, by MAX's own names."""

from trt_lora.runtime.interfaces.max.config import LoRAConfig
from trt_lora.runtime.interfaces.max.manager import LoRAManager
from trt_lora.runtime.interfaces.max.status import LoRAOperation, LoRAOutcome, LoRAStatus

__all__ = ["LoRAConfig", "LoRAManager", "LoRAOperation", "LoRAOutcome", "LoRAStatus"]
