"""Scheduler: requests with adapters of their own, answered by a batch that they join and leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from trt_lora.plugins.errors import ConfigError, LoRAError, OutputError, StateError
from trt_lora.runtime.generation.batch import Batch, Token
from trt_lora.runtime.generation.sampling import SamplingParams
from trt_lora.runtime.generation.text.prompts import check_prompt
from trt_lora.runtime.serving.adapter_cache import LeaseT
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request
from trt_lora.runtime.serving.running import Running


@dataclass(frozen=True)
class Answered:
    """What a step made, by the numbers of requests."""

    tokens: dict[int, Token] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)  # they have ended


class Scheduler:
    """A loop's body: `submit` at any time, `step` as long as there are requests.

    A request takes the adapter that its name means when it joins, and keeps that one to its end.

    Not for several threads at a time, except that adapters may be loaded, replaced, unloaded and
    pinned from any.
    """
