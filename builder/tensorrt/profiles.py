"""Optimization profiles: min, opt and max of every input."""

from collections.abc import Mapping, Sequence

from trt_lora.builder.checks.lengths import Lengths
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.contract.slots import SLOT_ROWS, SLOTS
from trt_lora.runtime.generation.decoding.static_inputs import BOUND
from trt_lora.runtime.generation.decoding.step_inputs import (
    BATCH,
    KEPT,
    PAST_SEQUENCE,
    SEQUENCE,
    TOTAL_SEQUENCE,
)
from trt_lora.runtime.manifest import GROWING, STATIC, Binding, Range

Triple = tuple[int, int, int]  # min, opt, max
Symbols = dict[str, Triple]


def make_profiles(
    batch: int, lengths: Lengths, lora: ResolvedLoRA, inputs: Sequence[Binding], kv_cache: str
) -> dict[str, dict[str, Range]]:
    """Return the range of every input in the profiles `decode` and `prefill`, in this order.

    A rank symbol and the slots have the same range in both. TensorRT tunes for opt: one sequence,
    half full when decoding, a prompt of full length in prefill, and all slots.

    Args:
        batch: the most sequences at a time.
        lengths: how long prompts and answers may be.
        lora: its ranks.
        inputs: what the graph takes.
        kv_cache: the form of its cache, one of `KV_CACHES`.
    """
    forms = {GROWING: _growing, STATIC: _static}
    decode, prefill = forms[kv_cache](batch, lengths)
    rank = (MIN_RANK, lora.opt_rank, lora.max_rank)
    slots = {SLOTS: (1, lora.max_loras, lora.max_loras), SLOT_ROWS: (1, 1, batch)}
    return {
        name: {binding.name: _range(binding, slots | symbols, rank) for binding in inputs}
        for name, symbols in (("decode", decode), ("prefill", prefill))
    }


def _growing(batch: int, lengths: Lengths) -> tuple[Symbols, Symbols]:
    prompt, total = lengths.max_input_len, lengths.max_seq_len
    half = max(total // 2, 1)
    decode: Symbols = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, 1, 1),
        PAST_SEQUENCE: (1, half, total - 1),
        TOTAL_SEQUENCE: (2, half + 1, total),
        KEPT: (1, 1, 1),
    }
    prefill: Symbols = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, prompt, prompt),
        PAST_SEQUENCE: (0, 0, total - 1),
        TOTAL_SEQUENCE: (1, prompt, total),
        KEPT: (1, 1, prompt),
    }
    return decode, prefill


def _static(batch: int, lengths: Lengths) -> tuple[Symbols, Symbols]:
    """With one bound, decoding has one set of shapes a batch, and reads the cache where it lies."""
    prompt, total = lengths.max_input_len, lengths.max_seq_len
    decode: Symbols = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, 1, 1),
        KEPT: (1, 1, batch),
        BOUND: (total, total, total),
    }
    prefill: Symbols = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, prompt, prompt),
        KEPT: (1, 1, max(batch, prompt)),
        BOUND: (1, prompt, total),
    }
    return decode, prefill


def _range(binding: Binding, symbols: Mapping[str, Triple], rank: Triple) -> Range:
    triples = [
        (size, size, size) if isinstance(size, int) else symbols.get(size, rank)
        for size in binding.shape
    ]
    low, opt, high = zip(*triples, strict=True)
    return Range(low, opt, high)
