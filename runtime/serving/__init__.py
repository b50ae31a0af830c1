"""Requests that wait for a row and a slot, and those that have both."""

from trt_lora.runtime.serving.adapter_cache import AdapterCache, AdapterLease
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.choice import Choice
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request
from trt_lora.runtime.serving.running import Running
from trt_lora.runtime.serving.scheduler import Scheduler, StepAnswers

__all__ = [
    "AdapterCache",
    "AdapterLease",
    "BatcherConfig",
    "Choice",
    "LoRABatcher",
    "Request",
    "Running",
    "Scheduler",
    "StepAnswers",
]
