"""What the scheduling of one step has come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

from trt_lora.runtime.serving.adapter_cache import LeaseT
from trt_lora.runtime.serving.running import Running


@dataclass
class Choice(Generic[LeaseT]):
    """Who joins at a step, and who never will."""

    rows: int  # that are left
    resident: Mapping[str, int]  # the adapters in slots when the step began
    joined: list[Running[LeaseT]] = field(default_factory=list)
    failed: dict[int, BaseException] = field(default_factory=dict)  # by request
