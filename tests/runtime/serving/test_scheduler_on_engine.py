"""A scheduler on ONNX Runtime answers each request as its adapter does alone."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from support.eventually import eventually
from support.models.served_llama import ServedLlama, served_llama
from support.models.tiny_models import VOCABULARY
from support.schedulers import answers_of, scheduler_of

from trt_lora.runtime import AdapterStore, SamplingParams

RANKS = {"a": 2, "b": 8, "c": 3}
SAMPLING = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLlama]:
    with served_llama(tmp_path_factory.mktemp("served"), RANKS, rows=4) as found:
        yield found


def test_more_adapters_than_slots_are_served_through_preemption_and_cancels(
    served: ServedLlama,
) -> None:
    engine, paths = served.engine, served.paths
    names = ["a", None, "b", "c", "a", "c", "b", None]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 4 + turn).tolist() for turn in range(len(names))]
    with closing(AdapterStore(engine)) as adapters:
        for name, path in paths.items():
            adapters.register(name, path)
        scheduler = scheduler_of(engine, adapters, max_wait_steps=3, max_num_batched_tokens=5)
        requests = [
            scheduler.submit(prompt, SAMPLING, adapter=name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        answers: dict[int, list[int | None]] = {request: [] for request in requests}

        def step() -> None:
            given = scheduler.step()
            assert not given.failed
            for request, token in given.tokens.items():
                answers[request].append(token.token_id)

        def begins() -> bool:
            step()
            return len(answers[requests[0]]) >= 3

        def ends() -> bool:
            step()
            return not scheduler

        step()
        scheduler.cancel(requests.pop())
        assert eventually(begins)
        scheduler.preempt(requests[0])
        assert eventually(ends)
        scheduler.check_integrity()
        for request, prompt, adapter in zip(requests, prompts, names, strict=False):
            (alone,) = answers_of(engine, adapters, [prompt], [adapter], SAMPLING)
            assert answers[request] == list(alone.token_ids)
