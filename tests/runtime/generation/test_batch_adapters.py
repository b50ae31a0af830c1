"""A batch whose sequences have adapters of their own answers each as PEFT does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.models.served_llama import ServedLlama, served_llama
from support.models.tiny_models import VOCABULARY
from support.schedulers import answers_of, scheduler_of
from support.steps import keep_logits, step_of

from trt_lora.plugins.errors import ConfigError, UnknownAdapterError
from trt_lora.runtime import AdapterStore, SamplingParams, Scheduler

RANKS = {"a": 2, "b": 8, "c": 3}
GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0)
TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLlama]:
    with served_llama(tmp_path_factory.mktemp("served"), RANKS, rows=5) as found:
        yield found


def prompt(seed: int, count: int = 6) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()
    return found


class Watched:
    """A batch whose logits are kept, with the adapter and the tokens of every sequence."""

    def __init__(
        self, batch: Scheduler, adapters: AdapterStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.batch, self.adapters = batch, adapters
        self.names: dict[int, str | None] = {}
        self.ids: dict[int, list[int]] = {}
        self.logits: dict[int, list[Any]] = {}
        keep_logits(self.batch._rows, self.logits, monkeypatch)

    def add(self, name: str | None, ids: list[int]) -> int:
        if name is not None:  # so that it joins at the next step, however long a load takes
            self.adapters.prefetch(name).result()
        row = self.batch.submit(ids, ENDLESS, adapter=name)
        self.names[row], self.ids[row], self.logits[row] = name, list(ids), []
        return row

    def step(self, count: int) -> None:
        for _ in range(count):
            for token in step_of(self.batch):
                assert token.token_id is not None
                self.ids[token.sequence_id].append(token.token_id)


def test_rows_that_join_and_leave_answer_as_peft_does_with_their_adapter(
    served: ServedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = served.adapters()
    batch = scheduler_of(served.engine, adapters, max_num_batched_tokens=4)
    watched = Watched(batch, adapters, monkeypatch)
    first = watched.add("a", prompt(1))
    watched.add(None, prompt(2, 3))
    watched.step(3)
    watched.add("b", prompt(3, 11))
    watched.add("a", prompt(4, 1))
    watched.step(6)
    watched.batch.cancel(first)  # a row moves to its place, with its adapter
    watched.step(4)
    for row in [row for row, name in watched.names.items() if name == "b"]:
        watched.batch.cancel(row)
    watched.add("c", prompt(5, 9))  # takes the slot that b had
    watched.step(20)
    adapters.check_integrity()
    for row, name in watched.names.items():
        ours = np.stack(watched.logits[row])
        theirs = served.expected(name, watched.ids[row][:-1])[-len(ours) :]
        assert np.abs(ours - theirs).max() < TOLERANCE, (row, name)
        others = {served_name for served_name in (*RANKS, None) if served_name != name}
        for other in others:
            wrong = served.expected(other, watched.ids[row][:-1])[-len(ours) :]
            assert np.abs(ours - wrong).max() > 10 * TOLERANCE, (row, name, other)


def test_prompts_are_answered_with_the_adapters_named_for_them(served: ServedLlama) -> None:
    adapters, names = served.adapters(), ["b", None, "a", "b"]
    prompts = [prompt(seed) for seed in range(4)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    found = answers_of(served.engine, adapters, prompts, names, sampling)
    for ids, name, completion in zip(prompts, names, found, strict=True):
        (alone,) = answers_of(served.engine, adapters, [ids], [name], sampling)
        assert completion.token_ids == alone.token_ids
        logits = served.expected(name, [*ids, *completion.token_ids])[len(ids) - 1 : -1]
        chosen = logits[np.arange(12), list(completion.token_ids)]
        assert np.all(logits.max(axis=-1) - chosen < TOLERANCE)
    assert len({completion.token_ids for completion in found}) > 1


def test_an_adapter_in_use_stays_and_a_third_waits_for_its_slot(served: ServedLlama) -> None:
    adapters = served.adapters()
    for name in "ab":
        adapters.bindings.activate(name)
    batch = scheduler_of(served.engine, adapters)
    rows = [batch.submit(prompt(1), ENDLESS, adapter=name) for name in ("a", "b", "b")]
    waiting = batch.submit(prompt(2), ENDLESS, adapter="c")
    batch.submit(prompt(2), ENDLESS)  # the base model needs none
    step_of(batch)
    assert adapters.bindings.slots.keys() == {"a", "b"}
    batch.cancel(rows[0])
    while not batch.tokens(waiting):
        step_of(batch)
    assert adapters.bindings.slots.keys() == {"b", "c"}
    batch.clear()
    for name in RANKS:
        adapters.unload(name)
    adapters.check_integrity()
    assert len(batch) == batch.running == 0


def test_an_adapter_unloaded_or_replaced_answers_to_the_end_of_its_sequences(
    served: ServedLlama,
) -> None:
    adapters = served.adapters()
    ids = prompt(3)
    (alone,) = answers_of(served.engine, adapters, [ids], ["a"], GREEDY)
    batch = scheduler_of(served.engine, adapters)
    old = batch.submit(ids, SamplingParams(max_tokens=9, temperature=0), adapter="a")
    tokens = [token.token_id for token in step_of(batch)]
    adapters.load("a", served.paths["b"], replace=True)
    new = batch.submit(ids, SamplingParams(max_tokens=9, temperature=0), adapter="a")
    while not batch.tokens(new):
        tokens += [token.token_id for token in step_of(batch) if token.sequence_id == old]
    given: list[int | None] = list(batch.tokens(new))
    adapters.unload("a")
    with pytest.raises(UnknownAdapterError):
        batch.submit(ids, adapter="a")
    found: dict[int, list[int | None]] = {old: tokens, new: given}
    while batch:
        for token in step_of(batch):
            found[token.sequence_id].append(token.token_id)
    (other,) = answers_of(served.engine, adapters, [ids], ["b"], GREEDY)
    assert found[old] == list(alone.token_ids[:9])
    assert found[new] == list(other.token_ids[:9])
    assert found[old] != found[new]
    assert adapters.names == ("b", "c")
    adapters.check_integrity()


def test_a_lease_that_is_passed_in_belongs_to_the_sequence(served: ServedLlama) -> None:
    adapters = served.adapters()
    batch = scheduler_of(served.engine, adapters, rows=1)
    row = batch.submit(prompt(1), adapter=adapters.lease("a"))
    mine = adapters.lease("b")
    with pytest.raises(ConfigError, match="prompt is empty"):
        batch.submit([], adapter=mine)
    adapters.release(mine)  # a request that is refused leaves it to its owner
    step_of(batch)
    batch.cancel(row)
    assert adapters.stats.leased == 0
    adapters.check_integrity()


def test_more_adapters_than_slots_are_answered_in_turns(served: ServedLlama) -> None:
    adapters, names = served.adapters(), [*RANKS, None] * 2
    ids = [prompt(seed) for seed in range(len(names))]
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    found = answers_of(served.engine, adapters, ids, names, sampling)
    for one, name, answer in zip(ids, names, found, strict=True):
        logits = served.expected(name, [*one, *answer.token_ids])[len(one) - 1 : -1]
        chosen = logits[np.arange(5), list(answer.token_ids)]
        assert np.all(logits.max(axis=-1) - chosen < TOLERANCE)
    assert adapters.stats.leased == 0


def test_logits_that_are_no_numbers_name_the_adapter_of_their_row(
    served: ServedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = scheduler_of(served.engine, served.adapters())
    good = batch.submit(prompt(1), ENDLESS, adapter="a")
    bad = batch.submit(prompt(2), ENDLESS, adapter="b")
    while not batch.tokens(good) or not batch.tokens(bad):
        step_of(batch)
    cache = batch._rows.cache
    (place,) = [at for at, s in enumerate(batch._rows.sequences) if s.id == bad]
    for tensor in cache.views(place, 1).values():
        tensor.numpy()[0, :, :2] = np.nan
    answers = batch.step()
    assert answers.failed.keys() == {bad}
    assert f"prompt {bad} are NaN or infinite with adapter 'b':" in str(answers.failed[bad])
    assert len(batch) == 1
