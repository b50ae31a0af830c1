"""Log probabilities of a prompt against transformers and PEFT, in float32."""

import numpy as np
import pytest
import torch
from conftest import TinyEngine
from support.models.tiny_sizes import VOCABULARY

from trt_lora.runtime import LoRAManager, SamplingParams, generate, open_engine
from trt_lora.runtime.generation.decoding import rows as decoding_rows
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize("chunk", [5, 64])
def test_they_are_those_of_transformers_with_the_active_adapter(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(decoding_rows, "_MOST_KEPT", chunk)
    prompts = np.random.default_rng(0).integers(3, VOCABULARY, (2, 13))
    reference = PeftReference(tiny_engine.model, {"a": tiny_engine.adapter})
    logits = torch.tensor(reference.logits("a", prompts, np.ones_like(prompts)))
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=4)
    with open_engine(tiny_engine.engine) as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", tiny_engine.adapter)
        manager.switch_weights("a")
        answers = generate(engine, prompts.tolist(), manager=manager, sampling=params)
    for answer, prompt, exact in zip(answers, prompts.tolist(), expected, strict=True):
        assert answer.prompt_logprobs is not None
        first, *known = answer.prompt_logprobs
        assert first is None
        assert len(known) == len(prompt) - 1
        for place, found in enumerate(known):
            assert found is not None
            best = np.argsort(-exact[place], kind="stable")[:4].tolist()
            assert set(found) == {prompt[place + 1], *best}
            for token, one in found.items():
                assert one.logprob == pytest.approx(exact[place, token], abs=1e-4)
