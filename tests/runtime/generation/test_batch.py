"""Continuous batching: rows that join and leave answer as transformers and PEFT do alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyEngine
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config
from support.schedulers import scheduler_of
from support.steps import keep_logits, step_of
from transformers import AutoModelForCausalLM

from trt_lora.plugins.errors import ConfigError, OutputError, StateError
from trt_lora.runtime import AdapterStore, Engine, SamplingParams, open_engine
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0)
TOLERANCE = 1e-4


class Served:
    """An engine with an adapter, and PEFT's model of the same."""

    def __init__(self, engine: Engine, model: Path, adapter: Path) -> None:
        self.engine = engine
        self.adapters = AdapterStore(engine)
        self.adapters.load("a", adapter)
        self.reference = PeftReference(model, {"a": adapter})

    def expected(self, ids: Sequence[int], name: str = "a") -> Any:
        """Logits [s, vocab] of a sequence by itself."""
        tokens = np.array([ids])
        return self.reference.logits(name, tokens, np.ones_like(tokens))[0]


@pytest.fixture(scope="module", params=["Llama", "Mistral", "Gemma2"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Four rows of 64 tokens; a sliding window of 4, soft caps and grouped heads among them."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder / "model")
    adapter = save_adapter(model, folder / "a", r=4)
    quick_build(tiny_config(model, folder / "engine", max_batch_size=4))
    with open_engine(folder / "engine", "onnxruntime") as engine:
        yield Served(engine, model, adapter)


class Watched:
    """A batch whose logits are kept, and the tokens of every sequence."""

    def __init__(self, at: Served, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.batch = scheduler_of(at.engine, at.adapters, **options)
        self.ids: dict[int, list[int]] = {}
        self.logits: dict[int, list[Any]] = {}
        keep_logits(self.batch._rows, self.logits, monkeypatch)

    def add(self, count: int, seed: int) -> int:
        prompt = np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()
        row = self.batch.submit(prompt, ENDLESS, adapter="a")
        self.ids[row], self.logits[row] = prompt, []
        return row

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for token in step_of(self.batch):
                assert token.token_id is not None
                self.ids[token.sequence_id].append(token.token_id)

    def error(self, at: Served) -> float:
        """The largest difference of a logit to the sequence by itself."""
        errors = []
        for row, ids in self.ids.items():
            ours = np.stack(self.logits[row])
            theirs = at.expected(ids[:-1])[-len(ours) :]
            errors.append(float(np.abs(ours - theirs).max()))
        return max(errors)


def serve(at: Served, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Watched:
    """Rows that begin at different times, leave, and are replaced, over 40 steps."""
    watched = Watched(at, monkeypatch, **options)
    first = watched.add(7, seed=1)
    watched.step(3)
    second, third = watched.add(2, seed=2), watched.add(19, seed=3)
    watched.step(9)
    watched.batch.cancel(first)  # the last row moves to its place
    watched.step(4)
    fourth, _ = watched.add(11, seed=4), watched.add(1, seed=5)
    watched.step(8)
    watched.batch.cancel(third)
    watched.batch.cancel(fourth)
    watched.step(2)
    watched.add(5, seed=6)
    watched.step(14)
    assert len(watched.ids[second]) > 2 + 32
    return watched


@pytest.mark.parametrize("chunk", [None, 3, 7])
def test_rows_of_any_age_answer_as_each_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    assert serve(served, monkeypatch, max_num_batched_tokens=chunk).error(served) < TOLERANCE


def test_a_prompt_longer_than_a_step_takes_is_run_in_chunks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(served, monkeypatch)
    watched.add(7, seed=1)
    watched.add(served.engine.manifest.max_input_len + 9, seed=2)
    watched.step(12)
    assert watched.error(served) < TOLERANCE


@pytest.mark.parametrize("served", ["Llama", "Gemma2"], indirect=True)  # a window may hide it
def test_a_stale_cache_would_be_seen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(self: KVCache, owner: Any, *prefix: Any) -> int:
        row = original(self, owner, *prefix)
        self.lengths[row] = stale.pop(0) if stale else 0
        return row

    original, stale = KVCache.admit, [0, 0, 0, 5]  # the fourth sequence finds five tokens
    monkeypatch.setattr(KVCache, "admit", admit)
    assert serve(served, monkeypatch).error(served) > 100 * TOLERANCE


def test_a_row_that_moves_without_its_keys_would_be_seen(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_row(self: KVCache, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]

    monkeypatch.setattr(KVCache, "copy_row", copy_row)
    assert serve(served, monkeypatch).error(served) > 100 * TOLERANCE


def test_a_row_answers_in_company_as_alone_bit_for_bit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Watched(served, monkeypatch)
    alone.add(7, seed=1)
    alone.step(20)
    beside = Watched(served, monkeypatch)
    beside.add(7, seed=1)
    beside.add(13, seed=2)
    beside.step(20)
    assert alone.ids[0] == beside.ids[0]
    # Matrix products of one row and of two may round differently.
    np.testing.assert_allclose(alone.logits[0], beside.logits[0], rtol=0, atol=1e-5)


def test_each_sequence_has_its_own_sampling_and_end(served: Served) -> None:
    batch = scheduler_of(served.engine)
    prompt = [5, 6, 7]
    greedy = batch.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))
    drawn = batch.submit(
        prompt, SamplingParams(max_tokens=4, temperature=1.5, seed=3, ignore_eos=True)
    )
    again = batch.submit(
        prompt, SamplingParams(max_tokens=4, temperature=1.5, seed=3, ignore_eos=True)
    )
    found: dict[int, list[int | None]] = {greedy: [], drawn: [], again: []}
    reasons = {}
    while batch:
        for token in step_of(batch):
            found[token.sequence_id].append(token.token_id)
            if token.finish_reason:
                reasons[token.sequence_id] = token.finish_reason
    assert found[drawn] == found[again] != found[greedy][:4]
    assert [len(found[row]) for row in (greedy, drawn, again)] == [6, 4, 4]
    assert set(reasons.values()) == {"length"}
    stop = batch.submit(
        prompt,
        SamplingParams(
            max_tokens=64, stop_token_ids=[found[greedy][1] or 0], ignore_eos=True, temperature=0
        ),
    )
    ends = [token for _ in range(2) for token in step_of(batch)]
    assert (ends[-1].sequence_id, ends[-1].token_id, ends[-1].finish_reason) == (stop, None, "stop")
    assert len(batch) == batch.running == 0


def test_a_sequence_ends_where_the_cache_does(served: Served) -> None:
    batch = scheduler_of(served.engine, rows=1)
    batch.submit([3] * 30, ENDLESS)
    tokens = []
    while batch:
        tokens += step_of(batch)
    assert len(tokens) == 64 - 30
    assert tokens[-1].finish_reason == "length"


def test_wrong_numbers_are_refused(served: Served) -> None:
    batch = scheduler_of(served.engine, rows=1)
    with pytest.raises(StateError, match="request 7 neither waits nor runs"):
        batch.cancel(7)
    with pytest.raises(ConfigError, match="rows is 5, expected a whole number from 1 to 4"):
        scheduler_of(served.engine, rows=5)
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens is 0, expected a number from 1 on"
    ):
        scheduler_of(served.engine, max_num_batched_tokens=0)
    with pytest.raises(ConfigError, match=r"prompt has 65 tokens, this engine takes 64; .*--max-s"):
        batch.submit([3] * 65)


def test_a_budget_of_bytes_is_as_many_rows_as_it_holds(served: Served) -> None:
    row = 4 * sum(
        int(np.prod([int(size) for size in binding.shape[1:]]))
        for binding in served.engine.manifest.inputs
        if binding.name.startswith("cache.")
    )
    found = [
        scheduler_of(served.engine, cache_bytes=rows * row + 1)._rows.cache.rows
        for rows in (1, 3, 99)
    ]
    assert found == [1, 3, 4]
    with pytest.raises(ConfigError, match=rf"one sequence of 64 tokens takes {row}; allow more"):
        scheduler_of(served.engine, cache_bytes=row - 1)
    with pytest.raises(ConfigError, match="pass one of them"):
        scheduler_of(served.engine, cache_bytes=row, rows=1)


def test_a_sequence_without_numbers_leaves_the_others_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(served, monkeypatch)
    bad, good = watched.add(4, seed=1), watched.add(6, seed=2)
    watched.step()
    cache = watched.batch._rows.cache
    for tensor in cache.views(0, 1).values():
        tensor.numpy()[0, :, :2] = np.nan
    answers = watched.batch.step()
    assert isinstance(answers.failed[bad], OutputError)
    assert f"prompt {bad} are NaN or infinite with adapter 'a'" in str(answers.failed[bad])
    watched.ids[good] += [token.token_id or 0 for token in answers.tokens.values()]
    for tensor in cache.views(0, cache.rows).values():
        assert np.isfinite(tensor.numpy()).all()
    del watched.ids[bad]
    replacing = watched.batch.submit([9, 8, 7], ENDLESS, adapter="a")
    watched.ids[replacing], watched.logits[replacing] = [9, 8, 7], []
    watched.step(5)
    assert len(watched.ids[good]) == 6 + 7
    assert watched.error(served) < TOLERANCE


def test_transformers_generates_the_same(tiny_engine: TinyEngine) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_engine.model)
    prompt = [5, 6, 7, 8]
    with torch.no_grad():
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        expected = model.generate(torch.tensor([prompt]), **options)[0, 4:].tolist()
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        batch = scheduler_of(engine)
        batch.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0))
        tokens = [token.token_id for _ in range(20) for token in step_of(batch)]
    assert tokens == expected
