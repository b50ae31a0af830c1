"""Optimization profiles: min, opt and max of every input."""

from collections.abc import Mapping, Sequence

from trt_lora.builder.checks.lengths import Lengths
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.plugins.contract.sites import MIN_RANK
from trt_lora.runtime.generation.step_inputs import (
    BATCH,
    KEPT,
    PAST_SEQUENCE,
    SEQUENCE,
    TOTAL_SEQUENCE,
)
from trt_lora.runtime.manifest import Binding, Range

Triple = tuple[int, int, int]  # min, opt, max


def make_profiles(
    batch: int, lengths: Lengths, lora: ResolvedLoRA, inputs: Sequence[Binding]
) -> dict[str, dict[str, Range]]:
    """Return the range of every input in the profiles `decode` and `prefill`, in this order.

    A rank symbol has the same range in both. TensorRT tunes for opt: one sequence, half full when
    decoding, a prompt of full length in prefill.

    Args:
        batch: the most sequences at a time.
        lengths: how long prompts and answers may be.
        lora: its ranks.
        inputs: what the graph takes.
    """
    prompt, total = lengths.max_input_len, lengths.max_seq_len
    half = max(total // 2, 1)
    decode: dict[str, Triple] = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, 1, 1),
        PAST_SEQUENCE: (1, half, total - 1),
        TOTAL_SEQUENCE: (2, half + 1, total),
        KEPT: (1, 1, 1),
    }
    prefill: dict[str, Triple] = {
        BATCH: (1, 1, batch),
        SEQUENCE: (1, prompt, prompt),
        PAST_SEQUENCE: (0, 0, total - 1),
        TOTAL_SEQUENCE: (1, prompt, total),
        KEPT: (1, 1, prompt),
    }
    rank = (MIN_RANK, lora.opt_rank, lora.max_rank)
    return {
        name: {binding.name: _range(binding, symbols, rank) for binding in inputs}
        for name, symbols in (("decode", decode), ("prefill", prefill))
    }


def _range(binding: Binding, symbols: Mapping[str, Triple], rank: Triple) -> Range:
    triples = [
        (size, size, size) if isinstance(size, int) else symbols.get(size, rank)
        for size in binding.shape
    ]
    low, opt, high = zip(*triples, strict=True)
    return Range(low, opt, high)
