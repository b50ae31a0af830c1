"""Operations on adapters, and their outcomes with MAX's values."""

from dataclasses import dataclass
from enum import Enum

from trt_lora.plugins.short_repr import short_repr


class LoRAOperation(Enum):
    """What a request asks for."""

    LOAD = "load"
    UNLOAD = "unload"


class LoRAStatus(Enum):
    """What became of it."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    UNSPECIFIED_ERROR = "unspecified_error"


@short_repr
@dataclass(frozen=True)
class LoRAOutcome:
    """A status, and the sentence that says why."""

    status: LoRAStatus
    message: str
