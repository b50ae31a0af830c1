"""Log probabilities of a prompt against transformers and PEFT, in float32."""

import numpy as np
import pytest
import torch
from conftest import TinyEngine
from support.models.tiny_sizes import VOCABULARY

from trt_lora.runtime import SamplingParams, open_engine
from trt_lora.runtime.generation.decoding import rows as decoding_rows
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch


@pytest.mark.parametrize("chunk", [5, 64])
def test_they_are_those_of_transformers_with_an_adapter(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(decoding_rows, "_MOST_KEPT", chunk)
    prompts = np.random.default_rng(0).integers(3, VOCABULARY, (2, 13))
    reference = PeftReference(tiny_engine.model, {"a": tiny_engine.adapter})
    logits = torch.tensor(reference.logits("a", prompts, np.ones_like(prompts)))
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=4)
    with open_engine(tiny_engine.engine) as engine:
        engine.adapters.load("a", tiny_engine.adapter)
        answers = engine.generate(prompts.tolist(), adapter="a", sampling=params)
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
