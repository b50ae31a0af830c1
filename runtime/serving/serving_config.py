"""ServingConfig: rows and budgets of a `Scheduler`, and the bounds of waits for a slot."""

from collections.abc import Sequence
from dataclasses import dataclass

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.decoding.kv_cache import cache_regions
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import HOST

# Tokens of prompts in a step: on a GPU, about as many as take it as long as a token of each row; on
# the host a piece of one prompt (see `StaticDecoder`), and where rows wait for their next token no
# more than makes a step about twice as long. A piece would make it eight times as long.
_HOST_BUDGET, _HOST_BESIDE_ROWS, _GPU_BUDGET = 256, 16, 512
_LEAST = {"max_wait_steps": 0, "max_wait_s": 0, "preempt_after": 0}  # of the others 1


@short_repr
@dataclass(frozen=True)
class ServingConfig:
    """How many requests run at a time, how much a step does, and how long a request waits."""

    rows: int | None = None  # sequences at a time, most; None: the engine's largest batch
    cache_bytes: int | None = None  # instead of `rows`: as many as a KV cache of this size holds
    # Of prompts in one step, over all rows, but never less than one chunk of one. None: 512 on a
    # GPU, about what a decode step of full rows costs; on the host 256, and 16 beside rows that are
    # decoded, unless more than those can have their first token in this step.
    max_num_batched_tokens: int | None = None
    shares_prefixes: bool = True  # run a prefix that another request had only once
    max_wait_steps: int = 32  # that a request waits for a slot before an adapter is drained for it
    max_wait_s: float = 2.0  # seconds, after which the same is done
    preempt_after: int = 64  # steps of draining, after which rows of the drained adapter are taken
    prefetch_depth: int = 4  # adapters that are read from disk before they have a slot
    scan_limit: int = 32  # adapters without a slot that a step looks at

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: a number is too small, or both `rows` and `cache_bytes` are given.
        """
        check_fields(self)
        if self.rows is not None and self.cache_bytes is not None:
            raise ConfigError("rows and cache_bytes both say how many sequences; pass one of them")
        for name, value in vars(self).items():
            if (
                value is not None
                and name != "shares_prefixes"
                and not value >= (least := _LEAST.get(name, 1))
            ):
                raise ConfigError(f"{name} is {value!r}, expected a number from {least} on")


def row_count(config: ServingConfig, manifest: Manifest) -> int:
    """Return how many sequences run at a time, most: by default the engine's largest batch.

    Raises:
        ConfigError: the engine does not take so many, or `cache_bytes` has room for none.
    """
    most = manifest.max_batch_size
    if config.cache_bytes is not None:
        row = sum(region.row_bytes for region in cache_regions(manifest, 1))
        if config.cache_bytes < row:
            raise ConfigError(
                f"cache_bytes is {config.cache_bytes}, and one sequence of {manifest.max_seq_len} "
                f"tokens takes {row}; allow more, or build with a smaller --max-seq-len"
            )
        return min(config.cache_bytes // max(row, 1), most)
    rows = most if config.rows is None else config.rows
    if rows > most:
        raise ConfigError(f"rows is {rows}, expected a whole number from 1 to {most}")
    return rows


def prompt_budget(
    config: ServingConfig, memory: Memory, *, decoded: int, waiting: Sequence[int]
) -> int:
    """Return how many tokens of prompts a step runs, most: by default what suits the device.

    Args:
        config: may say so.
        memory: of the device.
        decoded: how many rows are given their next token in it.
        waiting: tokens that are to be run of each prompt.
    """
    ends_them = len(waiting) > decoded and sum(waiting) <= _HOST_BUDGET
    host = _HOST_BUDGET if ends_them or not decoded else _HOST_BESIDE_ROWS
    default = host if memory.device == HOST else _GPU_BUDGET
    return config.max_num_batched_tokens or default
