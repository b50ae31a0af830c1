"""Build configuration with every choice resolved."""

from dataclasses import dataclass

from trt_lora.builder.checks.check_model import CheckedModel
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.plugins.tensorrt.flavour import Flavour


@dataclass(frozen=True)
class ResolvedBuild:
    """The options, and what was left to choose."""

    config: BuildConfig  # as it was asked for
    lora: ResolvedLoRA
    flavour: Flavour | None  # None: the ONNX file alone
    lora_plugin: str  # what LoRA nodes become in the plan
    model: CheckedModel

    @property
    def has_plan(self) -> bool:
        """Whether a plan is made."""
        return self.flavour is not None
