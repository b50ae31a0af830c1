"""vLLM's metrics of LoRA: adapters, memory and performance."""

from typing import Any

from trt_lora.runtime.store.stats import StoreStats

_MIB = 1 << 20


class Mean:
    """The mean of seconds, 0.0 of none."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, seconds: float) -> None:
        """Take one more into the mean."""
        self._sum, self._count = self._sum + seconds, self._count + 1

    @property
    def value(self) -> float:
        """The mean."""
        return self._sum / self._count if self._count else 0.0


def lora_metrics(
    stats: StoreStats,
    registered: int,
    active: int,
    capacity: int,
    switching: Mean,
    is_batched: bool,
) -> dict[str, dict[str, Any]]:
    """Return what vLLM's `get_lora_metrics` does, in its units: MiB and seconds.

    adapters      registered, active, capacity, utilization (active adapters by slots)
    memory        adapter_memory_mb (on the host), gpu_memory_usage (all slots),
                  memory_efficiency (slots that hold an adapter, by slots)
    performance   avg_activation_time (copies into a slot), avg_switching_time (a step's rows),
                  punica_kernel_enabled (one launch for all adapters: the plugin's kernels)
    """
    activation = stats.copy_seconds / stats.copies if stats.copies else 0.0
    return {
        "adapters": {
            "registered": registered,
            "active": active,
            "capacity": capacity,
            "utilization": active / stats.slots,
        },
        "memory": {
            "adapter_memory_mb": stats.memory_bytes / _MIB,
            "gpu_memory_usage": stats.slots * stats.slot_bytes / _MIB,
            "memory_efficiency": stats.in_slots / stats.slots,
        },
        "performance": {
            "avg_activation_time": activation,
            "avg_switching_time": switching.value,
            "punica_kernel_enabled": is_batched,
        },
    }
