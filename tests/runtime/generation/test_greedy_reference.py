"""A greedy answer, token by token, against transformers and PEFT."""

import numpy as np
import pytest
from conftest import TinyEngine

from trt_lora.runtime import LoRAManager, SamplingParams, generate, open_engine
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def greedy_by_transformers(tiny_engine: TinyEngine, prompt: list[int], steps: int) -> list[int]:
    """Greedy tokens of base model and adapter "a" by whole forward passes."""
    reference = PeftReference(tiny_engine.model, {"a": tiny_engine.adapter})
    ids = list(prompt)
    for _ in range(steps):
        batch = np.array([ids], np.int64)
        ids.append(int(reference.logits("a", batch, np.ones_like(batch))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_greedy_answer_is_that_of_transformers_with_the_active_adapter(
    tiny_engine: TinyEngine,
) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    with open_engine(tiny_engine.engine) as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", tiny_engine.adapter)
        manager.switch_weights("a")
        (answer,) = generate(engine, [PROMPT], manager=manager, sampling=sampling)
    assert list(answer.token_ids) == greedy_by_transformers(tiny_engine, PROMPT, 8)
    assert (answer.text, answer.finish_reason) == ("", "length")
