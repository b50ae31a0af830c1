"""TensorRT-LLM's options of the LoRA cache: each holds for the engine, or is refused."""

from dataclasses import dataclass

from trt_lora.plugins.checked import check_fields, check_range, checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.interfaces.agreed_limits import check_rank
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.store.config import StoreConfig


@short_repr
@dataclass(frozen=True)
class LoraCacheOptions:
    """The four `lora_cache_*` parameters; None is the engine's own, or no limit.

    An "adapter size" is a rank. TensorRT-LLM sizes the pages of its cache by the two; slots have
    the engine's maximum rank, and its profiles the optimal one, so both have to be the engine's.
    """

    lora_cache_optimal_adapter_size: int | None = None
    lora_cache_max_adapter_size: int | None = None
    lora_cache_gpu_memory_fraction: float | None = None  # (0, 1] of the free memory of the device
    lora_cache_host_memory_bytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        """Refuse what is no value of an option.

        Raises:
            ConfigError: a field has another type.
        """
        check_fields(self)

    @checked
    def store_config(self, manifest: Manifest) -> StoreConfig:
        """Return the two sizes as an `AdapterStore` takes them.

        Raises:
            ConfigError: an option is not what the engine has, or no size.
        """
        check_rank("lora_cache_max_adapter_size", self.lora_cache_max_adapter_size, manifest)
        optimal = self.lora_cache_optimal_adapter_size
        if optimal not in (None, manifest.opt_lora_rank):
            raise ConfigError(
                f"lora_cache_optimal_adapter_size is {optimal}, this engine is fastest at rank "
                f"{manifest.opt_lora_rank}, by the adapters that it was built for (--lora-dir); "
                "leave it out"
            )
        fraction, host = self.lora_cache_gpu_memory_fraction, self.lora_cache_host_memory_bytes
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(
                f"lora_cache_gpu_memory_fraction is {fraction}, expected more than 0, up to 1"
            )
        check_range("lora_cache_host_memory_bytes", host, 1)
        share = None if fraction is None else float(fraction)  # 1 is all of it and not a byte
        return StoreConfig(host_memory=host, device_memory=share)
