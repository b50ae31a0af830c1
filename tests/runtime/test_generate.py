"""Generation on a real, tiny engine: batches, stopping, sampling, limits."""

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import TinyEngine
from tiny import POSITIONS, VOCABULARY

from trt_lora.plugins.errors import ConfigError, TensorError
from trt_lora.runtime import Engine, LoRAManager, Sampling, generate, open_engine
from trt_lora.scripts.peft_reference import PeftReference

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [3]]


@pytest.fixture(scope="module")
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine) as running:
        yield running


@pytest.fixture(scope="module")
def manager(engine: Engine, tiny_engine: TinyEngine) -> LoRAManager:
    loaded = LoRAManager()
    loaded.initialize_engine_bindings(engine)
    loaded.load_weights("a", tiny_engine.adapter)
    return loaded


def tokens(engine: Engine, *prompts: list[int], **options: object) -> list[tuple[int, ...]]:
    """Token ids of each answer; stop tokens are off unless given."""
    sampling = Sampling(**{"max_new_tokens": 8, "stop_token_ids": ()} | options)  # type: ignore[arg-type]
    return [answer.token_ids for answer in generate(engine, prompts, sampling=sampling)]


def greedy_by_transformers(tiny_engine: TinyEngine, prompt: list[int], steps: int) -> list[int]:
    """Greedy tokens of base model and adapter "a" by whole forward passes."""
    reference = PeftReference(tiny_engine.model, {"a": tiny_engine.adapter})
    ids = list(prompt)
    for _ in range(steps):
        batch = np.array([ids], np.int64)
        ids.append(int(reference.logits("a", batch, np.ones_like(batch))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_greedy_answer_is_that_of_transformers_with_the_active_adapter(
    engine: Engine, manager: LoRAManager, tiny_engine: TinyEngine
) -> None:
    manager.switch_weights("a")
    sampling = Sampling(max_new_tokens=8, stop_token_ids=())
    (answer,) = generate(engine, [PROMPTS[0]], manager=manager, sampling=sampling)
    assert list(answer.token_ids) == greedy_by_transformers(tiny_engine, PROMPTS[0], 8)
    assert (answer.text, answer.finish_reason) == ("", "length")


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 0)])
def test_prompts_of_a_batch_are_answered_as_if_alone(engine: Engine, pair: tuple[int, int]) -> None:
    first, second = (PROMPTS[index] for index in pair)
    assert tokens(engine, first, second) == [*tokens(engine, first), *tokens(engine, second)]


def test_a_stop_token_ends_one_sequence_and_not_the_other(engine: Engine) -> None:
    long, other = tokens(engine, PROMPTS[0], PROMPTS[1])
    stop = long[3]
    assert stop not in long[:3]
    assert stop not in other
    sampling = Sampling(max_new_tokens=8, stop_token_ids=(stop,))
    stopped, whole = generate(engine, PROMPTS[:2], sampling=sampling)
    assert (stopped.token_ids, stopped.finish_reason) == (long[:3], "stop")
    assert (whole.token_ids, whole.finish_reason) == (other, "length")


def test_the_models_own_stop_token_is_used_unless_others_are_given(engine: Engine) -> None:
    assert engine.manifest.base_model.stop_token_ids == (2,)
    answers = generate(engine, PROMPTS[:2], sampling=Sampling(max_new_tokens=30))
    assert all(2 not in answer.token_ids for answer in answers)


def test_the_answer_ends_where_the_engine_does(engine: Engine) -> None:
    prompt = list(range(3, 3 + POSITIONS // 2))
    (answer,) = tokens(engine, prompt, max_new_tokens=1000)
    assert len(prompt) + len(answer) == POSITIONS


def test_a_seed_decides_what_is_drawn(engine: Engine) -> None:
    hot = {"temperature": 5.0, "top_k": 50, "top_p": 0.99}
    first = tokens(engine, PROMPTS[0], seed=1, **hot)
    assert tokens(engine, PROMPTS[0], seed=1, **hot) == first
    assert tokens(engine, PROMPTS[0], seed=2, **hot) != first
    assert all(0 <= token < VOCABULARY for token in first[0])


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([[3]] * 3, ConfigError, "3 prompts are more than this engine's batch of 2"),
        ([[3] * 33], ConfigError, "a prompt has 33 tokens, this engine takes 32"),
        ([[]], TensorError, "at least one token"),
        ([], TensorError, "a batch one prompt"),
        (["text"], ConfigError, r"has no tokenizer\.json; pass prompts as lists of token ids"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(
    engine: Engine, prompts: list[list[int]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(engine, prompts)
