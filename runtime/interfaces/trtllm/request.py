"""The LoRA part of a TensorRT-LLM request: a task id, and with the first one weights and config."""

from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.interop import tensor_from

_TASK_IDS = range(1 << 64)  # TensorRT-LLM's are unsigned integers of 64 bits


def check_task_id(what: str, task_id: int) -> None:
    """Refuse what is no number of a task.

    Raises:
        AdapterError: it is none.
    """
    if type(task_id) is not int or task_id not in _TASK_IDS:
        raise AdapterError(
            f"{what} is {shown(task_id)}, expected a whole number from 0 to {_TASK_IDS[-1]}"
        )


@short_repr
@dataclass(frozen=True, eq=False)
class TrtllmLoraRequest:
    """`lora_task_id`, `lora_weights` and `lora_config`; none of them asks for the base model."""

    lora_task_id: int | None = None
    # Each a numpy array, or what `tensor_from` takes, such as a torch tensor.
    lora_weights: object | None = None  # [rows, width] or [1, rows, width]
    lora_config: object | None = None  # int32 [rows, 3 or 4] or [1, rows, 3 or 4]

    def __post_init__(self) -> None:
        """Check that what must come together does.

        Raises:
            AdapterError: weights come without a config or the reverse, or without an id, or the id
                is none.
        """
        has_weights, has_config = self.lora_weights is not None, self.lora_config is not None
        if has_weights != has_config:
            missing = "lora_config" if has_weights else "lora_weights"
            raise AdapterError(f"{missing} is missing: lora_weights and lora_config come together")
        if self.lora_task_id is None:
            if has_weights:
                raise AdapterError("lora_task_id must be set for LoRA inference")
        else:
            check_task_id("lora_task_id", self.lora_task_id)

    @property
    def arrays(self) -> tuple[Array, Array] | None:
        """Weights and config on the host; None if they did not come.

        Raises:
            TensorError: one is no tensor, or of a dtype or layout that is not supported.
        """
        if self.lora_weights is None or self.lora_config is None:
            return None
        weights, config = (
            given if isinstance(given, np.ndarray) else tensor_from(given).read_storage()
            for given in (self.lora_weights, self.lora_config)
        )
        return weights, config
