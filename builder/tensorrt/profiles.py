"""Optimization profiles: min, opt and max of every input."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trt_lora.builder.checks.lengths import Lengths
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.plugins.contract.slots import SLOT_ROWS, SLOTS, SLOTS_AND_BASE
from trt_lora.runtime.generation.decoding.step_inputs import (
    BATCH,
    BOUND,
    KEPT,
    SEQUENCE,
    SOURCE_SIZE,
)
from trt_lora.runtime.manifest import Binding, Range

Profiles = Mapping[str, Mapping[str, Range]]  # the range of every input, by profile and input

Triple = tuple[int, int, int]  # min, opt, max
Symbols = dict[str, Triple]


def make_profiles(
    batch: int,
    lengths: Lengths,
    lora: ResolvedLoRA,
    inputs: Sequence[Binding],
    widths: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, Range]]:
    """Return the range of every input in the profiles `decode` and `prefill`, in this order.

    A rank symbol and the slots have the same range in both. TensorRT tunes for opt: one sequence,
    half full when decoding, a prompt of full length in prefill, and all slots.

    Args:
        batch: the most sequences at a time.
        lengths: how long prompts and answers may be.
        lora: its ranks.
        inputs: what the graph takes.
        widths: of modules that may be saved whole, whose rank they are then, by its symbol.
    """
    decode, prefill = _symbols(batch, lengths)
    ranks = {
        symbol: (MIN_RANK, lora.opt_rank, max(width, lora.max_rank))
        for symbol, width in widths.items()
    }
    return {
        "decode": _ranges(inputs, decode | ranks, lora, batch),
        "prefill": _ranges(inputs, prefill | ranks, lora, batch),
    }


def encoder_profiles(
    lengths: Lengths, lora: ResolvedLoRA, inputs: Sequence[Binding]
) -> dict[str, dict[str, Range]]:
    """Return the range of every input of an encoder, which takes one source at a time."""
    source = lengths.max_source_len
    symbols: Symbols = {BATCH: (1, 1, 1), SOURCE_SIZE: (1, source, source)}
    return {"encode": _ranges(inputs, symbols, lora, 1)}


def _ranges(
    inputs: Sequence[Binding], symbols: Symbols, lora: ResolvedLoRA, rows: int
) -> dict[str, Range]:
    rank = (MIN_RANK, lora.opt_rank, lora.max_rank)
    slots = slot_symbols(lora, (1, 1, rows))
    return {binding.name: range_of(binding, slots | symbols, rank) for binding in inputs}


def slot_symbols(lora: ResolvedLoRA, rows: Triple) -> Symbols:
    """Return the sizes of what rows with adapters of their own read; TensorRT tunes for all slots.

    Args:
        lora: how many slots there are.
        rows: sizes of the batch; one slot may be for all of them.
    """
    most = lora.max_loras
    return {
        SLOTS: (1, most, most),
        SLOTS_AND_BASE: (2, most + 1, most + 1),
        SLOT_ROWS: (1, *rows[1:]),
    }


def _symbols(batch: int, lengths: Lengths) -> tuple[Symbols, Symbols]:
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


def range_of(binding: Binding, symbols: Mapping[str, Triple], rank: Triple) -> Range:
    """Return the range of an input; a symbol that is not listed is a rank."""
    triples = [
        (size, size, size) if isinstance(size, int) else symbols.get(size, rank)
        for size in binding.shape
    ]
    low, opt, high = zip(*triples, strict=True) if triples else ((), (), ())  # of a scalar
    return Range(low, opt, high)
