"""Each interface on an engine: rows answer as PEFT does with the adapters that it was given."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from support.adapters.trtllm_files import CONFIG, WEIGHTS
from support.models.served_llama import ServedLlama, served_llama
from support.models.tiny_models import VOCABULARY
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora import runtime
from trt_lora.runtime import AdapterStore, SamplingParams
from trt_lora.runtime.interfaces import max, trtllm, vllm
from trt_lora.runtime.store.entry import Lease

RANKS = {"a": 2, "b": 8}
SAMPLING = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLlama]:
    with served_llama(tmp_path_factory.mktemp("served"), RANKS, rows=3) as found:
        yield found


def assert_answers_as_peft(
    served: ServedLlama, adapters: AdapterStore, taken: Mapping[str, Lease | str | None]
) -> None:
    """A sequence for each name, with what the interface says that it takes."""
    batch = scheduler_of(served.engine, adapters)
    rows = {
        batch.submit(prompt(seed), SAMPLING, adapter=adapter): (name, seed)
        for seed, (name, adapter) in enumerate(taken.items())
    }
    tokens: dict[int, list[int]] = {row: [] for row in rows}
    while len(batch):
        for token in step_of(batch):
            assert token.token_id is not None
            tokens[token.sequence_id].append(token.token_id)
    for row, (name, seed) in rows.items():
        assert_answer_is_of(served, name, prompt(seed), tokens[row])
    adapters.check_integrity()


def prompt(seed: int) -> list[int]:
    """Six random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, 6).tolist()
    return found


def assert_answer_is_of(
    served: ServedLlama, name: str, prompt: list[int], answer: list[int]
) -> None:
    """PEFT would have chosen each token with this adapter, and not each with another one."""
    ids = np.array([prompt + answer])
    for other in (*RANKS, ""):
        logits = served.reference.logits(other, ids, np.ones_like(ids))[0][5:-1]
        below = logits.max(axis=-1) - logits[np.arange(8), answer]
        assert (below.max() < TOLERANCE) == (other == name), (name, other)


def test_max_serves_what_it_loaded(served: ServedLlama) -> None:
    config, manifest = max.LoRAConfig(enable_lora=True, max_num_loras=2), served.engine.manifest
    adapters = AdapterStore(served.engine, config.store_config(manifest))
    manager = max.LoRAManager(config, adapters)
    for name, path in served.paths.items():
        assert manager.load_adapter(f"{name}={path}") is max.LoRAStatus.SUCCESS
        manager.activate_adapter(name)
    assert_answers_as_peft(served, adapters, {"b": "b", "": None, "a": "a"})


def test_tensorrt_llm_serves_what_its_requests_brought(served: ServedLlama, tmp_path: Path) -> None:
    manifest = served.engine.manifest
    adapters = AdapterStore(served.engine, trtllm.LoraCacheOptions().store_config(manifest))
    tasks = trtllm.PeftCacheManager(adapters)
    for task_id, (name, path) in enumerate(served.paths.items()):
        folder = tmp_path / name
        runtime.save_adapter(runtime.load_adapter(path), folder, "trtllm", dtype="float32")
        arrays = np.load(folder / WEIGHTS), np.load(folder / CONFIG)
        request = trtllm.TrtllmLoraRequest(task_id, *arrays)
        tasks.mark_request_done(tasks.add_request_peft(request))
    later = [trtllm.TrtllmLoraRequest(task_id) for task_id in range(2)]
    a, b = (tasks.add_request_peft(request) for request in later)
    assert_answers_as_peft(served, adapters, {"b": b, "": None, "a": a})
    assert adapters.stats.leased == 0  # the sequences owned them


def test_vllm_serves_what_its_requests_name(served: ServedLlama) -> None:
    config, manifest = vllm.LoRAConfig(max_loras=2), served.engine.manifest
    adapters = AdapterStore(served.engine, config.store_config(manifest))
    worker = vllm.WorkerLoRAManager(vllm.LRUCacheLoRAModelManager(config, adapters))
    paths = enumerate(served.paths.items(), start=1)
    requests = [vllm.LoRARequest(name, number, str(path)) for number, (name, path) in paths]
    worker.set_active_adapters(requests, vllm.LoRAMapping.map_sequence_to_adapters([2, None, 1]))
    assert worker.manager.step_inputs()["lora_slot"].numpy().tolist() == [1, -1, 0]
    assert_answers_as_peft(served, adapters, {"b": "b", "": None, "a": "a"})
    assert worker.manager.get_lora_metrics()["adapters"]["utilization"] == 1.0


def test_vllms_llm_answers_with_what_each_prompt_asks_for(served: ServedLlama) -> None:
    paths = enumerate(served.paths.items(), start=1)
    loras = {name: vllm.LoRARequest(name, number, str(path)) for number, (name, path) in paths}
    names = ["b", "", "a", "b", ""]  # more than the engine has rows
    prompts = [{"prompt_token_ids": prompt(seed)} for seed in range(len(names))]
    with vllm.LLM(served.engine.directory, enable_lora=True) as llm:
        answers = llm.generate(prompts, SAMPLING, lora_request=[loras.get(n) for n in names])
    for seed, (name, answer) in enumerate(zip(names, answers, strict=True)):
        assert answer.prompt_token_ids == prompt(seed)
        assert_answer_is_of(served, name, prompt(seed), answer.outputs[0].token_ids)
