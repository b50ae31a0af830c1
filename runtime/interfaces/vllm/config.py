"""vLLM's LoRA options: each holds for the engine, or is refused."""

from dataclasses import dataclass, replace

from trt_lora.plugins.checked import check_fields, checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.interfaces.agreed_limits import check_rank, check_slots, limits_of_slots
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # vLLM's short names
_LARGEST_RANK = 512
_REFUSED = {  # option -> what an engine has instead
    "lora_extra_vocab_size": "a vocabulary is fixed when an engine is built; retrain without it",
    "fully_sharded_loras": "shard_adapter splits A or B as TensorRT-LLM does; leave it out",
    "bias_enabled": "an adapter that changes biases is refused when it is loaded; leave it out",
    "long_lora_scaling_factors": "an engine has one rotary scaling; leave it out",
}


@short_repr
@dataclass(frozen=True)
class LoRAConfig:
    """vLLM's `LoRAConfig`; None is what the engine was built with."""

    max_loras: int | None = None  # adapters in a batch: slots
    max_lora_rank: int | None = None
    lora_dtype: str | None = None  # "auto", or the engine's
    lora_extra_vocab_size: int = 0
    max_cpu_loras: int | None = None  # registered adapters; by default twice the slots
    fully_sharded_loras: bool = False
    bias_enabled: bool = False
    long_lora_scaling_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without an engine.

        Raises:
            ConfigError: (a ValueError) an option is out of range, or nothing here can do it.
        """
        check_fields(self)
        if self.max_loras is not None and self.max_loras <= 0:
            raise ConfigError(f"max_loras must be positive, got {self.max_loras}")
        if self.max_lora_rank is not None and not 0 < self.max_lora_rank <= _LARGEST_RANK:
            raise ConfigError(
                f"max_lora_rank must be in range (0, {_LARGEST_RANK}], got {self.max_lora_rank}"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < (self.max_loras or 1):
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras ({self.max_loras or 1})"
            )
        for option, instead in _REFUSED.items():
            if value := getattr(self, option):
                raise ConfigError(f"{option} is {shown(value)}: {instead}")

    @checked
    def store_config(self, manifest: Manifest) -> StoreConfig:
        """Return the limits of `max_loras` slots; `max_cpu_loras` is the manager's to hold.

        Raises:
            ConfigError: the engine has fewer.
        """
        return limits_of_slots("max_loras", self.max_loras, manifest)

    @checked
    def resolved(self, adapters: AdapterStore) -> "LoRAConfig":
        """Return the config with every option as these adapters have it.

        Raises:
            ConfigError: an option is another than theirs, or they have no slots.
        """
        manifest, slots = adapters.manifest, check_slots("max_loras", self.max_loras, adapters)
        check_rank("max_lora_rank", self.max_lora_rank, manifest)
        dtype = self.effective_dtype
        if dtype not in (None, manifest.dtype):
            raise ConfigError(
                f"lora_dtype is {shown(self.lora_dtype)}, this engine is {manifest.dtype}; "
                f"pass 'auto', or build one with --dtype {dtype}"
            )
        registered = 2 * slots if self.max_cpu_loras is None else self.max_cpu_loras
        return replace(
            self,
            max_loras=slots,
            max_lora_rank=manifest.max_lora_rank,
            lora_dtype=manifest.dtype,
            max_cpu_loras=registered,
        )

    @property
    def effective_dtype(self) -> str | None:
        """The dtype asked for by its whole name; None is the engine's."""
        if self.lora_dtype in (None, "auto"):
            return None
        return _DTYPES.get(str(self.lora_dtype), self.lora_dtype)
