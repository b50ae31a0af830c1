"""Token choice against a brute-force reference: greedy, temperature, top-k, top-p, seed."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.sampling import Logits, Sampling, choose

VOCAB = 12


def some_logits(rows: int = 1, *, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def expected(logits: npt.NDArray[np.float32], sampling: Sampling) -> dict[int, float]:
    """Probability by token of one row, by definition: temperature, then top-k, then top-p."""
    weights = {t: math.exp(float(x) / sampling.temperature) for t, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    ranked = ranked[: sampling.top_k or None]
    total = sum(weights[token] for token in ranked)
    mass, kept = 0.0, []
    for token in ranked:
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def drawn(logits: Logits, sampling: Sampling, draws: int) -> npt.NDArray[np.float64]:
    """Share of every token in many draws from one row."""
    tokens = choose(np.repeat(logits, draws, axis=0), sampling, np.random.default_rng(0))
    return np.bincount(tokens, minlength=VOCAB) / draws


# ----------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 12, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
def test_tokens_are_drawn_as_often_as_their_definition_says(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = some_logits()
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    share, probability = drawn(logits, sampling, 4000), np.zeros(VOCAB)
    for token, value in expected(logits[0], sampling).items():
        probability[token] = value
    assert set(np.flatnonzero(share)) <= set(np.flatnonzero(probability))
    # Five standard deviations of a share of 4000 draws.
    assert (abs(share - probability) <= 5 * np.sqrt(probability / 4000) + 1e-12).all()


def test_the_fewest_tokens_that_reach_top_p_are_kept() -> None:
    logits = np.log(np.array([[0.1, 0.5, 0.15, 0.25]], np.float32))
    kept = {
        top_p: set(choose(np.repeat(logits, 500, 0), Sampling(temperature=1, top_p=top_p), rng()))
        for top_p in (0.4, 0.6, 0.8, 0.95)
    }
    assert kept == {0.4: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}, 0.95: {0, 1, 2, 3}}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_k=5, top_p=0.5),
        Sampling(temperature=100, top_k=1),
        Sampling(temperature=100, top_p=1e-6),
        Sampling(temperature=1e-4),
    ],
)
def test_one_token_to_choose_from_is_the_greedy_one(sampling: Sampling) -> None:
    logits = some_logits(50)
    np.testing.assert_array_equal(choose(logits, sampling, rng()), logits.argmax(axis=1))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = some_logits(2000)
    logits[:, 3:] = -np.inf
    for top_k, top_p in itertools.product((0, 5), (1.0, 0.999)):
        tokens = choose(logits, Sampling(temperature=5, top_k=top_k, top_p=top_p), rng())
        assert set(tokens) == {0, 1, 2}


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 0]], np.float32)
    assert choose(logits, Sampling(temperature=1), rng()) == [0]


@pytest.mark.parametrize("temperature", [1e-8, 1e-300, 1e-308])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = some_logits(20)
    tokens = choose(logits, Sampling(temperature=temperature), rng())
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_greedy_takes_the_first_of_equal_tokens_and_draws_nothing() -> None:
    logits, generator = np.zeros((2, VOCAB), np.float32), rng()
    logits[1, [4, 7]] = 1
    before = generator.bit_generator.state
    np.testing.assert_array_equal(choose(logits, Sampling(), generator), [0, 4])
    assert generator.bit_generator.state == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_there_is_one_token_per_row_and_the_logits_stay(temperature: float) -> None:
    logits = some_logits(7)
    before = logits.copy()
    tokens = choose(logits, Sampling(temperature=temperature, top_k=3, top_p=0.5), rng())
    assert tokens.shape == (7,)
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(logits, before)


def test_rows_are_drawn_independently() -> None:
    tokens = choose(np.zeros((200, VOCAB), np.float32), Sampling(temperature=1), rng())
    assert len(set(tokens)) == VOCAB


# ------------------------------------------------------------------------------------------- seed


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    logits, sampling = some_logits(100), Sampling(temperature=2)
    first, again, other = (choose(logits, sampling, rng(seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


# ------------------------------------------------------------------------------------- bad values


def test_the_default_is_greedy() -> None:
    assert Sampling().temperature == 0


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("max_new_tokens", 0, "1 or more"),
        ("max_new_tokens", -1, "1 or more"),
        ("temperature", -0.1, r"0 \(greedy\) or more, and finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "finite"),
        ("top_k", -1, r"0 \(all\) or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("seed", -1, "0 or more"),
    ],
)
def test_a_value_without_a_meaning_is_refused_with_the_choices(
    name: str, value: float, choices: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}, expected .*{choices}"):
        Sampling(**{name: value})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "fields",
    [{"max_new_tokens": 1}, {"temperature": 1e-9}, {"top_k": 10**9}, {"top_p": 1.0}, {"seed": 0}],
)
def test_the_ends_of_the_ranges_are_taken(fields: dict[str, float]) -> None:
    assert vars(Sampling(**fields)).items() >= fields.items()  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
