"""Token sampling: greedy, or temperature, then top-k, then top-p.

Tokens are ranked: the greatest logit first, of equal ones the lower id first. Greedy takes the
first. Top-k keeps the first k, and top-p (nucleus sampling, arXiv 1904.09751) the fewest of the
first that reach p of what top-k keeps. Drawn is the first token up to which there is more than the
draw's part of what is kept. All of it is float64.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.generation.candidates import Candidates, ranked, total
from trt_lora.runtime.generation.text.token_ids import token_ids

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Draws = npt.NDArray[np.float64]

UNDECIDED = -1  # in place of a token, where more candidates have to decide
_FEW = 256  # candidates to begin with: they are nearly always enough
_MORE = 8  # times as many where they were not

_WHOLE = ("max_new_tokens", "top_k", "seed")


@short_repr
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a generation."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    seed: int = 0
    stop_token_ids: Collection[int] | None = None  # None: those of the engine's manifest

    def __post_init__(self) -> None:
        """Refuse values without a meaning, and keep the stop tokens as a tuple.

        Raises:
            ConfigError: a value is of another type, or out of its range.
        """
        if self.stop_token_ids is not None:
            stops = token_ids("stop_token_ids", self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", stops)
        self._check("max_new_tokens", 1, np.inf, "1 or more")
        self._check("temperature", 0, np.finfo(float).max, "0 (greedy) or more, and finite")
        self._check("top_k", 0, np.inf, "0 (all) or more")
        self._check("top_p", np.nextafter(0, 1), 1, "above 0 and at most 1")
        self._check("seed", 0, np.inf, "0 or more")

    def _check(self, name: str, least: float, most: float, choices: str) -> None:
        value = getattr(self, name)
        numbers = (int, np.integer) if name in _WHOLE else (int, float, np.number)
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            kind = "a whole number, " if name in _WHOLE else "a number, "
            raise ConfigError(f"{name} is {value!r}, expected {kind}{choices}")


def generator(seed: int, prompt: Sequence[int], answered: int = 0) -> np.random.Generator:
    """Return where a sequence's draws come from: nothing of the rest of its batch decides them.

    Args:
        seed: of its parameters.
        prompt: token ids.
        answered: how many of the last of them are its answer so far: their draws are made.
    """
    draws = np.random.default_rng([seed, *prompt[: len(prompt) - answered]])
    draws.random(answered)
    return draws


def choose(logits: Logits, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
    """Return one token per row, which depends on that row and its draw alone.

    Args:
        logits: [rows, vocab]; -inf is allowed, NaN is not.
        sampling: how to choose, for each row.
        draws: [rows], from 0 up to 1 and not 1; unused where greedy.

    Returns:
        Token ids [rows].
    """
    tokens = np.asarray(logits.argmax(axis=-1), np.int64)
    rows, count = np.flatnonzero([params.temperature for params in sampling]), _FEW
    totals = _totals(logits, sampling)
    while rows.size:
        candidates = _candidates([logits[row] for row in rows], totals[rows], count)
        tokens[rows] = draw(candidates, [sampling[int(row)] for row in rows], draws[rows])
        rows, count = rows[tokens[rows] == UNDECIDED], count * _MORE
    return tokens


def draw(candidates: Candidates, sampling: Sequence[SamplingParams], draws: Draws) -> Tokens:
    """Return one token per row, as `choose` does, where the candidates decide which it is.

    Top-k needs k candidates, top-p those that reach p, and temperature alone those that reach the
    draw.

    Args:
        candidates: of each row.
        sampling: how to choose, for each row.
        draws: [rows], from 0 up to 1 and not 1; unused where greedy.

    Returns:
        Token ids [rows], `UNDECIDED` where the logits themselves have to be asked.
    """
    rows, count = np.arange(len(sampling)), candidates.tokens.shape[1]
    temperature, top_k, top_p = _parameters(sampling, candidates.vocabulary)
    mass = _mass(candidates.logits, temperature)
    last = np.minimum(top_k, count) - 1
    total_mass = np.where(top_k < candidates.vocabulary, np.nan, candidates.totals)
    total_mass = np.where(top_k <= count, mass[rows, last], total_mass)  # of what top-k keeps
    ahead = np.pad(mass, ((0, 0), (1, 0)))[:, :-1]
    nucleus = (ahead < (top_p * total_mass)[:, None]).sum(axis=1)
    is_whole = mass[:, -1] >= top_p * total_mass  # that is the nucleus; nothing reaches NaN
    kept = np.where(is_whole, mass[rows, np.minimum(nucleus - 1, last)], total_mass)
    first = (mass <= (draws * kept)[:, None]).sum(axis=1)
    decided = is_whole | ((top_p == 1) & (mass[:, -1] > draws * kept))
    tokens = candidates.tokens[rows, np.minimum(first, count - 1)]
    return np.where(decided, tokens, UNDECIDED).astype(np.int64)


def _candidates(rows: Sequence[Logits], totals: npt.NDArray[np.float64], count: int) -> Candidates:
    tokens = np.stack([ranked(row, count) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, tokens, strict=True)])
    return Candidates(tokens, logits, totals, rows[0].size)


def _totals(logits: Logits, sampling: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """The total of each row, NaN where nothing asks for it."""
    return np.array(
        [
            total(row, params.temperature) if params.temperature and not params.top_k else np.nan
            for row, params in zip(logits, sampling, strict=True)
        ]
    )


def _parameters(
    sampling: Sequence[SamplingParams], vocabulary: int
) -> tuple[npt.NDArray[np.float64], Tokens, npt.NDArray[np.float64]]:
    """Temperature, top-k and top-p of each row; greedy is top-k 1 at any temperature."""
    greedy = [params.temperature == 0 for params in sampling]
    temperature = [params.temperature or 1 for params in sampling]
    top_k = [min(params.top_k or vocabulary, vocabulary) for params in sampling]
    top_p = np.array([params.top_p for params in sampling], np.float64)
    return np.array(temperature, np.float64), np.where(greedy, 1, top_k), top_p


def _mass(logits: Logits, temperature: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probability up to each candidate [rows, count], in units of the first one's."""
    with np.errstate(over="ignore"):  # so far below the first that its probability is 0
        scores = (logits.astype(np.float64) - logits[:, :1]) / temperature[:, None]
    return np.asarray(np.exp(scores).cumsum(axis=1))
