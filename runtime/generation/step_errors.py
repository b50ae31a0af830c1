"""Errors of the sequences of a batch that cannot go on."""

from collections.abc import Hashable, Mapping, Sequence

from trt_lora.plugins.errors import OutputError


def non_finite_logits(rows: Sequence[Hashable], adapters: str) -> OutputError:
    """Return the error of sequences whose logits are NaN or infinite with `adapters`."""
    return OutputError(
        f"the logits of prompt {_listed(rows)} are NaN or infinite with {adapters}"
        ": a value left the engine's number range; use a lower strength, or build with --dtype "
        "float32 or bfloat16",
        rows,
    )


def grammar_exhausted(reasons: Mapping[Hashable, str]) -> OutputError:
    """Return the error of sequences whose structured output became too large to follow."""
    reason = next(iter(reasons.values()))
    return OutputError(
        f"the structured output of prompt {_listed([*reasons])} cannot go on: {reason}; simplify "
        "what structured_outputs asks for",
        [*reasons],
    )


def _listed(rows: Sequence[Hashable]) -> str:
    return ", ".join(map(str, rows))
