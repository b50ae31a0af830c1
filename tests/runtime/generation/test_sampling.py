"""Token choice against a brute-force reference: greedy, temperature, top-k, top-p, seed."""

import itertools
import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import Logits, Tokens
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.race import Keys
from trt_lora.runtime.generation.sampling import choose, generator, next_key, next_keys

VOCAB = 12


def some_logits(rows: int = 1, *, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def expected(logits: npt.NDArray[np.float32], sampling: SamplingParams) -> dict[int, float]:
    """Probability by token of one row, by definition: temperature, then top-k, then top-p."""
    weights = {t: math.exp(float(x) / sampling.temperature) for t, x in enumerate(logits)}
    ordered = sorted(weights, key=lambda token: -weights[token])
    ordered = ordered[: sampling.top_k or None]
    total = sum(weights[token] for token in ordered)
    mass, kept = 0.0, []
    for token in ordered:
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def some_keys(rows: int, *, seed: int = 0) -> Keys:
    return next_keys(np.random.default_rng(seed), rows)


def chosen(logits: Logits, sampling: SamplingParams, keys: Keys) -> Tokens:
    """One token per row, all chosen in one way."""
    return choose(HostTopK(logits), [sampling] * len(logits), keys)


def drawn(logits: Logits, sampling: SamplingParams, draws: int) -> npt.NDArray[np.float64]:
    """Share of every token in many draws from one row."""
    tokens = chosen(np.repeat(logits, draws, axis=0), sampling, some_keys(draws))
    return np.bincount(tokens, minlength=VOCAB) / draws


# ----------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 12, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
def test_tokens_are_drawn_as_often_as_their_definition_says(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = some_logits()
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    share, probability = drawn(logits, sampling, 4000), np.zeros(VOCAB)
    for token, value in expected(logits[0], sampling).items():
        probability[token] = value
    assert set(np.flatnonzero(share)) <= set(np.flatnonzero(probability))
    # Five standard deviations of a share of 4000 draws.
    assert (abs(share - probability) <= 5 * np.sqrt(probability / 4000) + 1e-12).all()


def test_the_fewest_tokens_that_reach_top_p_are_kept() -> None:
    logits = np.log(np.array([[0.1, 0.5, 0.15, 0.25]], np.float32))
    kept = {
        top_p: set(
            chosen(
                np.repeat(logits, 500, 0),
                SamplingParams(temperature=1, top_p=top_p),
                some_keys(500),
            )
        )
        for top_p in (0.4, 0.6, 0.8, 0.95)
    }
    assert kept == {0.4: {1}, 0.6: {1, 3}, 0.8: {1, 2, 3}, 0.95: {0, 1, 2, 3}}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, top_p=0.5, temperature=0),
        SamplingParams(temperature=100, top_k=1),
        SamplingParams(temperature=100, top_p=1e-6),
        SamplingParams(temperature=1e-4),
    ],
)
def test_one_token_to_choose_from_is_the_greedy_one(sampling: SamplingParams) -> None:
    logits = some_logits(50)
    np.testing.assert_array_equal(chosen(logits, sampling, some_keys(50)), logits.argmax(axis=1))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = some_logits(2000)
    logits[:, 3:] = -np.inf
    for top_k, top_p in itertools.product((0, 5), (1.0, 0.999)):
        tokens = chosen(
            logits,
            SamplingParams(temperature=5, top_k=top_k, top_p=top_p),
            some_keys(2000),
        )
        assert set(tokens) == {0, 1, 2}


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 0]], np.float32)
    assert chosen(logits, SamplingParams(temperature=1), some_keys(1)) == [0]


@pytest.mark.parametrize("temperature", [1e-8, 1e-300, 1e-308])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = some_logits(20)
    tokens = chosen(logits, SamplingParams(temperature=temperature), some_keys(20))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_greedy_takes_the_first_of_equal_tokens_whatever_is_drawn() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [4, 7]] = 1
    for seed in range(5):
        tokens = chosen(logits, SamplingParams(temperature=0), some_keys(2, seed=seed))
        np.testing.assert_array_equal(tokens, [0, 4])


@pytest.mark.parametrize("rows", [[0], [1, 0], [0, 1, 2], [2, 2, 0]])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=2, top_k=7, top_p=0.9),
        SamplingParams(temperature=0),
    ],
)
def test_a_row_is_chosen_as_if_alone(sampling: SamplingParams, rows: list[int]) -> None:
    logits, keys = some_logits(3), some_keys(3)
    alone = [chosen(logits[[row]], sampling, keys[[row]])[0] for row in rows]
    np.testing.assert_array_equal(chosen(logits[rows], sampling, keys[rows]), alone)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_there_is_one_token_per_row_and_the_logits_stay(temperature: float) -> None:
    logits = some_logits(7)
    before = logits.copy()
    tokens = chosen(
        logits,
        SamplingParams(temperature=temperature, top_k=3, top_p=0.5),
        some_keys(7),
    )
    assert tokens.shape == (7,)
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(logits, before)


def test_rows_are_drawn_independently() -> None:
    tokens = chosen(
        np.zeros((200, VOCAB), np.float32),
        SamplingParams(temperature=1),
        some_keys(200),
    )
    assert len(set(tokens)) == VOCAB


# ------------------------------------------------------------------------------------------- seed


def test_a_sequence_draws_by_its_seed_and_its_prompt() -> None:
    first, again, other_seed, other_prompt = (
        next_keys(generator(seed, prompt), 100)
        for seed, prompt in ((7, [5, 6]), (7, [5, 6]), (8, [5, 6]), (7, [6, 5]))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other_seed).any()
    assert (first != other_prompt).any()


def test_a_sequence_that_goes_on_draws_behind_what_it_has_drawn() -> None:
    whole = next_keys(generator(7, [5, 6]), 10)
    draws = generator(7, [5, 6])
    next_keys(draws, 3)
    np.testing.assert_array_equal(next_keys(draws, 7), whole[3:])
    one_by_one = generator(7, [5, 6])
    assert [next_key(one_by_one) for _ in range(10)] == whole.tolist()


def test_the_keys_of_a_seed_never_change() -> None:
    """They are 64 bits of PCG64 seeded with seed and prompt: answers can be repeated later."""
    draws = np.random.default_rng(np.random.SeedSequence([7, 5, 6]))
    expected = draws.integers(1 << 64, size=5, dtype=np.uint64)
    np.testing.assert_array_equal(next_keys(generator(7, [5, 6]), 5), expected)


def test_without_a_seed_every_sequence_draws_something_else() -> None:
    first, other = (next_keys(generator(None, [5, 6]), 4) for _ in range(2))
    assert (first != other).any()


@pytest.mark.parametrize("seed", [-2, -(1 << 63), (1 << 64) - 1])
def test_seeds_of_64_bits_are_taken(seed: int) -> None:
    keys = next_keys(generator(SamplingParams(seed=seed).seed, [1]), 4)
    np.testing.assert_array_equal(next_keys(generator(seed, [1]), 4), keys)


# ------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", -1, "1 or more"),
        ("temperature", -0.1, r"0 \(greedy\) or more, and finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", math.nan, "finite"),
        ("top_k", -2, r"0 or -1 \(all\), or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("seed", -(1 << 63) - 1, "of 64 bits"),
        ("seed", 1 << 64, "of 64 bits"),
        ("seed", 1.5, "int or None"),
        ("max_tokens", "8", "int or None"),
        ("max_tokens", True, "int or None"),
        ("temperature", "0.5", "float"),
        ("temperature", 1j, "float"),
        ("top_p", None, "float"),
    ],
)
def test_a_value_without_a_meaning_is_refused_with_the_choices(
    name: str, value: object, choices: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}.*, expected .*{choices}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(2)}
    sampling = SamplingParams(**given, top_p=np.float64(1), seed=np.uint8(7))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert chosen(some_logits(4), sampling, some_keys(4)).shape == (4,)


@pytest.mark.parametrize(
    "stops",
    [[2, 9], (2, 9), {2: "two", 9: "nine"}.keys(), np.array([2, 9]), range(2, 10, 7), {9, 2}],
)
def test_stop_tokens_may_come_in_any_collection(stops: Collection[int]) -> None:
    assert sorted(SamplingParams(stop_token_ids=stops).stop_token_ids or ()) == [2, 9]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (2, r"stop_token_ids is 2 \(int\), expected Collection or None"),
        ("2", "stop_token_ids is '2', expected a collection"),
        (["2"], r"stop_token_ids holds a str, expected token ids"),
        ([2.0], r"holds 2.0 \(float\)"),
        ([True], r"holds True \(bool\)"),
        ([[2]], r"holds a list"),
        ([3, -1], "stop_token_ids holds token id -1, expected 0 or more"),
    ],
)
def test_stop_tokens_that_are_none_are_refused_by_name(stops: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(stop_token_ids=stops)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 1}, {"temperature": 1e-9}, {"top_k": 10**9}, {"top_p": 1.0}, {"seed": 0}],
)
def test_the_ends_of_the_ranges_are_taken(fields: dict[str, float]) -> None:
    assert vars(SamplingParams(**fields)).items() >= fields.items()  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
