"""The rows of a batch: how many sequences it holds, in a cache of either form."""

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.cache_regions import rows_within
from trt_lora.runtime.generation.decoding.growing_rows import GrowingRows
from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.decoding.static_rows import StaticRows
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import STATIC, Manifest
from trt_lora.runtime.memory.tensor import TensorMap


def row_count(manifest: Manifest, rows: int | None, cache_bytes: int | None) -> int:
    """Return how many sequences a batch has at a time, most.

    Args:
        manifest: of the engine.
        rows: the number itself; None is the engine's largest batch.
        cache_bytes: instead: as many as a static cache of this size holds.

    Raises:
        ConfigError: both are given, or the engine does not take so many.
    """
    if cache_bytes is not None:
        _check_budget(manifest, rows)
        rows = rows_within(manifest, cache_bytes)
    rows = manifest.max_batch_size if rows is None else rows
    _check("rows", rows, manifest.max_batch_size)
    return rows


def rows_of(
    engine: Executor,
    bindings: TensorMap,
    rows: int,
    prefill_chunk: int | None,
    adapters: SlotAdapters | None,
) -> Rows:
    """Return room for so many sequences.

    Args:
        engine: a running engine.
        bindings: its LoRA inputs.
        rows: sequences at a time, most.
        prefill_chunk: tokens of a prompt that one step runs, most; None is the whole prompt.
        adapters: of the sequences, where each has its own.

    Raises:
        ConfigError: the engine does not take so long a chunk.
        BackendError: the device has no room for the cache.
    """
    manifest = engine.manifest
    chunk = manifest.max_input_len if prefill_chunk is None else prefill_chunk
    _check("prefill_chunk", chunk, manifest.max_input_len)
    if manifest.kv_cache == STATIC:
        return StaticRows(engine, bindings, rows, chunk, adapters)
    return GrowingRows(engine, bindings)


def _check_budget(manifest: Manifest, rows: int | None) -> None:
    if rows is not None:
        raise ConfigError("rows and cache_bytes both say how many sequences; pass one of them")
    if manifest.kv_cache != STATIC:
        raise ConfigError(
            "cache_bytes is for a static cache, and this engine's grows; pass rows, or build with "
            "--kv-cache static"
        )


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}, expected a whole number from 1 to {most}")
