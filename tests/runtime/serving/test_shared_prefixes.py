"""A prefix is run once: for whom, and for whom never; and a step's budget of prompt tokens."""

from pathlib import Path

import pytest
from support.fakes.slot_engine import SlotEngine, expected_answer, number_file
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving import serving_config
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.store import AdapterStore

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PROMPT = [*range(4, 16)]


class CountingEngine(SlotEngine):
    """Counts the tokens that each run has in rows of more than one."""

    def __init__(self) -> None:
        super().__init__(slots=2, rows=3)
        self.prompts: list[int] = []

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        ids = tensor_map["input_ids"].numpy()
        if ids.shape[1] > 1:
            self.prompts.append(ids.size)
        return super().execute(tensor_map)


@pytest.fixture
def adapters(tmp_path: Path) -> AdapterStore:
    found = AdapterStore(CountingEngine())
    for number in (1, 2):
        found.load(str(number), number_file(tmp_path, number))
        found.bindings.activate(str(number))
    return found


def answer(scheduler: Scheduler, prompt: list[int], **options: str | None) -> list[int | None]:
    """The tokens of one request, which nobody else is answered with."""
    number = scheduler.submit(prompt, GREEDY, **options)
    found = []
    while number in scheduler:
        found += [token.token_id for token in step_of(scheduler)]
        scheduler.check_integrity()
    return found


def test_the_next_turn_of_a_conversation_runs_what_is_new_alone(adapters: AdapterStore) -> None:
    scheduler = scheduler_of(CountingEngine(), rows=1)
    said = [token or 0 for token in answer(scheduler, PROMPT)]
    turn = [*PROMPT, *said, 20, 21]
    assert answer(scheduler, turn) == expected_answer(turn, 0, GREEDY)
    # The last token of an answer is in no row.
    assert scheduler.shared_tokens == len(PROMPT) + len(said) - 1


@pytest.mark.parametrize(
    ("first", "then", "shares"),
    [
        ({"adapter": "1"}, {"adapter": "1"}, True),
        ({"adapter": "1"}, {"adapter": "2"}, False),
        ({"adapter": "1"}, {}, False),
        ({}, {"adapter": "1"}, False),
        ({"salt": "a"}, {"salt": "a"}, True),
        ({"salt": "a"}, {"salt": "b"}, False),
        ({"salt": "a"}, {}, False),
    ],
)
def test_a_prefix_is_shared_with_one_adapter_and_one_salt_alone(
    adapters: AdapterStore, first: dict[str, str], then: dict[str, str], shares: bool
) -> None:
    scheduler = scheduler_of(CountingEngine(), adapters)
    answer(scheduler, PROMPT, **first)
    prompt = [*PROMPT, 20]
    number = int(then.get("adapter", 0))
    assert answer(scheduler, prompt, **then) == expected_answer(prompt, number, GREEDY)
    assert scheduler.shared_tokens == (len(PROMPT) if shares else 0)


def test_a_request_knows_what_was_shared_and_when_it_joined(adapters: AdapterStore) -> None:
    """Each by itself, also where a row is taken and given back meanwhile."""
    scheduler = scheduler_of(CountingEngine(), adapters, rows=1)
    answer(scheduler, PROMPT)
    first, second = ([*PROMPT, 20], [21, 22])
    requests = [scheduler.requests(prompt, GREEDY)[0] for prompt in (first, second)]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    joined = requests[0].joined_at
    scheduler.preempt(requests[0].id)
    while scheduler:
        scheduler.step()
    assert [request.cached_tokens for request in requests] == [len(PROMPT), 0]
    assert requests[0].joined_at == joined
    assert 0 <= joined - requests[0].arrived_at < requests[1].joined_at - requests[1].arrived_at


def test_a_replaced_adapter_shares_nothing_with_the_one_before(
    adapters: AdapterStore, tmp_path: Path
) -> None:
    scheduler = scheduler_of(CountingEngine(), adapters)
    answer(scheduler, PROMPT, adapter="1")
    adapters.load("1", number_file(tmp_path, 7), replace=True)
    prompt = [*PROMPT, 20]
    number = scheduler.submit(prompt, GREEDY, adapter="1")
    found: list[int | None] = []
    while number in scheduler:
        found += [token.token_id for token in step_of(scheduler)]
        scheduler.sleep(0.01)
    assert found == expected_answer(prompt, 7, GREEDY)
    assert scheduler.shared_tokens == 0


def test_sharing_can_be_switched_off(adapters: AdapterStore) -> None:
    scheduler = scheduler_of(CountingEngine(), adapters, shares_prefixes=False)
    for _ in range(2):
        assert answer(scheduler, PROMPT) == expected_answer(PROMPT, 0, GREEDY)
    assert scheduler.shared_tokens == 0


def test_a_row_that_is_kept_is_given_up_where_another_request_needs_it() -> None:
    engine = CountingEngine()
    scheduler = scheduler_of(engine, AdapterStore(engine), rows=2)
    prompts = [[seed, *range(40, 50)] for seed in range(4)]
    for prompt in [*prompts, *prompts]:
        assert answer(scheduler, prompt) == expected_answer(prompt, 0, GREEDY)
    for prompt in prompts:
        scheduler.submit(prompt, GREEDY)
    while scheduler:
        scheduler.step()
        scheduler.check_integrity()


@pytest.mark.parametrize("budget", [1, 4, 7])
def test_a_step_runs_no_more_tokens_of_prompts_than_its_budget(budget: int) -> None:
    engine = CountingEngine()
    scheduler = scheduler_of(
        engine, AdapterStore(engine), max_num_batched_tokens=budget, shares_prefixes=False
    )
    asked = [[seed, *range(20, 30)] for seed in range(3)]
    numbers = [scheduler.submit(prompt, GREEDY) for prompt in asked]
    found: dict[int, list[int | None]] = {number: [] for number in numbers}
    first: list[int] = []
    while scheduler:
        engine.prompts.clear()
        for token in step_of(scheduler):
            first += [token.sequence_id] if not found[token.sequence_id] else []
            found[token.sequence_id].append(token.token_id)
        assert sum(engine.prompts) <= budget
    assert first == numbers  # the oldest first
    assert list(found.values()) == [expected_answer(prompt, 0, GREEDY) for prompt in asked]


def test_rows_that_wait_for_a_token_wait_for_few_tokens_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_config, "_HOST_BESIDE_ROWS", 4)
    engine = CountingEngine()
    scheduler = scheduler_of(engine, AdapterStore(engine))
    alone, beside = [1, *range(20, 30)], [2, *range(20, 30)]
    scheduler.submit(alone, GREEDY)
    scheduler.step()
    assert sum(engine.prompts) == len(alone)
    number = scheduler.submit(beside, GREEDY)
    steps = []
    for _ in range(3):
        engine.prompts.clear()
        steps.append(scheduler.step().tokens)
        assert 0 < sum(engine.prompts) <= 4
        assert len(steps[-1]) >= 1
    assert number in steps[-1]


@pytest.mark.parametrize(
    ("newcomers", "budget", "is_one"), [(2, 30, True), (1, 30, False), (2, 20, False)]
)
def test_more_newcomers_than_rows_have_their_first_tokens_in_one_step_where_that_is_enough(
    newcomers: int, budget: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_config, "_HOST_BESIDE_ROWS", 4)
    monkeypatch.setattr(serving_config, "_HOST_BUDGET", budget)
    engine = CountingEngine()
    scheduler = scheduler_of(engine, AdapterStore(engine))
    scheduler.submit([1, *range(20, 30)], GREEDY)
    scheduler.step()
    numbers = {scheduler.submit([seed, *range(20, 30)], GREEDY) for seed in range(2, 2 + newcomers)}
    assert (numbers <= scheduler.step().tokens.keys()) == is_one


def test_what_was_decoded_is_delivered_before_prompts_are_run() -> None:
    engine = CountingEngine()
    scheduler = scheduler_of(engine, AdapterStore(engine))
    running = scheduler.submit([4], GREEDY)
    scheduler.step()
    scheduler.submit(PROMPT, GREEDY)
    engine.prompts.clear()
    early: list[tuple[StepAnswers, int]] = []
    late = scheduler.step(lambda answers: early.append((answers, len(engine.prompts))))
    ((delivered, prompts),) = early
    assert delivered.tokens.keys() == {running}
    assert prompts == 0
    assert len(engine.prompts) == 1
    assert running not in late.tokens
