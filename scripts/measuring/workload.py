"""What a benchmark asks: rows, prompt, answer and rounds."""

from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import Manifest

RANKS = (8, 16, 64)  # of random adapters, as far as the engine takes them
ROWS = (1, 8)
PROMPT_TOKENS, NEW_TOKENS = 64, 32  # less where the engine has less room


@dataclass(frozen=True)
class BatchWorkload:
    """Prompts of one length, one of each row, all answered together."""

    rows: int
    prompt_tokens: int
    new_tokens: int  # of each row, the first included

    def prompts(self, manifest: Manifest, seed: int) -> list[list[int]]:
        """Return random token ids [rows][prompt_tokens]; other seeds, other prompts."""
        rng = np.random.default_rng((seed, self.rows, self.prompt_tokens))
        shape = (self.rows, self.prompt_tokens)
        ids: list[list[int]] = rng.integers(0, manifest.vocabulary_size, shape).tolist()
        return ids


def workloads(
    manifest: Manifest,
    rows: tuple[int, ...] | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
) -> tuple[BatchWorkload, ...]:
    """Return one workload for each number of rows; None is as much of the default as fits.

    Raises:
        ConfigError: a number is beyond the engine's limits.
    """
    most = manifest.max_batch_size
    rows = rows or tuple(sorted({min(count, most) for count in ROWS}))
    longest = manifest.max_seq_len - 2
    if prompt_tokens is None:
        prompt_tokens = min(PROMPT_TOKENS, longest // 2)
    if new_tokens is None:
        new_tokens = min(NEW_TOKENS, manifest.max_seq_len - prompt_tokens)
    for count in rows:
        _check("--rows", count, 1, most)
    _check("--prompt-tokens", prompt_tokens, 1, longest)
    # One for the time to the first token, one for the time of a token.
    _check("--new-tokens", new_tokens, 2, manifest.max_seq_len - prompt_tokens)
    return tuple(BatchWorkload(count, prompt_tokens, new_tokens) for count in dict.fromkeys(rows))


def ranks_of(manifest: Manifest, ranks: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the ranks of random adapters; None is the default, as far as the engine takes them.

    Raises:
        ConfigError: a rank is beyond the engine's limit.
    """
    if not manifest.sites:
        return ()
    most = manifest.max_lora_rank
    if ranks is None:
        return tuple(sorted({min(rank, most) for rank in RANKS}))
    for rank in ranks:
        _check("--ranks", rank, 1, most)
    return tuple(dict.fromkeys(ranks))


def _check(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option} is {value}, and the engine takes {least} to {most}")


def how_many(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
