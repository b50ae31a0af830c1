"""Choose maximum input and sequence lengths from the options and the model's limits."""

from dataclasses import dataclass

from trt_lora.builder.config import DEFAULT_MAX_INPUT_LEN, DEFAULT_MAX_SEQ_LEN, BuildConfig
from trt_lora.plugins.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """The longest prompt, and the most tokens of prompt and answer together."""

    max_input_len: int
    max_seq_len: int
    max_source_len: int = 0  # positions of a source; 0: the model takes none


def choose_lengths(config: BuildConfig, positions: int | None) -> Lengths:
    """Return the lengths of an engine: what is asked for, else the defaults, as far as they fit.

    What is left out follows what is asked for: a prompt is never longer than the whole, and a long
    prompt leaves room for an answer as long, if the model has the positions.

    Args:
        config: the options.
        positions: how many tokens the model can take; None if nothing limits them.

    Raises:
        ConfigError: an option is beyond the model's positions.
    """
    for option, wanted in (
        ("--max-seq-len", config.max_seq_len),
        ("--max-input-len", config.max_input_len),
    ):
        if wanted is not None and positions is not None and wanted > positions:
            raise ConfigError(
                f"{option} is {wanted}, but the model has {positions} positions; "
                f"pass {option} {positions} or less"
            )
    total = config.max_seq_len or _default_total(config.max_input_len or 0, positions)
    return Lengths(config.max_input_len or min(DEFAULT_MAX_INPUT_LEN, total), total)


def _default_total(prompt: int, positions: int | None) -> int:
    total = max(DEFAULT_MAX_SEQ_LEN, 2 * prompt)
    return total if positions is None else min(total, positions)
