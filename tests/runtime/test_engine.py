"""An engine's answers: batches, adapters, strengths, stopping, sampling, limits."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from conftest import TinyEngine
from support.fakes.fake_engine import FakeExecutor, make_weights
from support.models.tiny_sizes import POSITIONS, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers

from trt_lora.plugins.errors import AdapterError, ConfigError, OutputError, StateError
from trt_lora.runtime import Adapter, Engine, SamplingParams, Tensor, TensorMap, open_engine
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import tensor_from_numpy

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [3]]


@pytest.fixture(scope="module")
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine) as running:
        yield running


def tokens(engine: Engine, *prompts: list[int], **options: object) -> list[tuple[int, ...]]:
    """Token ids of each answer; stop tokens are off unless given."""
    sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "temperature": 0.0} | options)  # type: ignore[arg-type]
    return [answer.token_ids for answer in engine.generate(prompts, sampling=sampling)]


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 0)])
def test_prompts_of_a_batch_are_answered_as_if_alone(engine: Engine, pair: tuple[int, int]) -> None:
    first, second = (PROMPTS[index] for index in pair)
    assert tokens(engine, first, second) == [*tokens(engine, first), *tokens(engine, second)]


def test_a_stop_token_ends_one_sequence_and_not_the_other(engine: Engine) -> None:
    long, other = tokens(engine, PROMPTS[0], PROMPTS[1])
    stop = long[3]
    assert stop not in long[:3]
    assert stop not in other
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(stop,), ignore_eos=True, temperature=0)
    stopped, whole = engine.generate(PROMPTS[:2], sampling=sampling)
    assert (stopped.token_ids, stopped.finish_reason) == (long[:3], "stop")
    assert (whole.token_ids, whole.finish_reason) == (other, "length")


def test_the_models_own_stop_token_is_used_unless_others_are_given(engine: Engine) -> None:
    assert engine.manifest.base_model.stop_token_ids == (2,)
    answers = engine.generate(PROMPTS[:2], sampling=SamplingParams(max_tokens=30, temperature=0))
    assert all(2 not in answer.token_ids for answer in answers)


def test_the_answer_ends_where_the_engine_does(engine: Engine) -> None:
    prompt = list(range(3, 3 + POSITIONS // 2))
    (answer,) = tokens(engine, prompt, max_tokens=1000)
    assert len(prompt) + len(answer) == POSITIONS


def test_a_prompt_may_take_every_place(engine: Engine) -> None:
    """The token behind it needs none; it is what a shorter answer would have gone on with."""
    prompt = [3, *range(3, 2 + POSITIONS)]
    assert len(prompt) == engine.manifest.max_seq_len
    (answer,) = tokens(engine, prompt)
    assert len(answer) == 1


HOT = {"temperature": 3.0, "top_k": 50, "top_p": 0.99}


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (1, 2), (2, 0), (2, 2)])
def test_what_is_drawn_for_a_prompt_does_not_depend_on_its_batch(
    engine: Engine, pair: tuple[int, int]
) -> None:
    for seed in range(5):
        first, second = (PROMPTS[index] for index in pair)
        alone = [tokens(engine, prompt, seed=seed, **HOT)[0] for prompt in (first, second)]
        assert tokens(engine, first, second, seed=seed, **HOT) == alone


def test_a_seed_decides_what_is_drawn(engine: Engine) -> None:
    hot = {"temperature": 5.0, "top_k": 50, "top_p": 0.99}
    first = tokens(engine, PROMPTS[0], seed=1, **hot)
    assert tokens(engine, PROMPTS[0], seed=1, **hot) == first
    assert tokens(engine, PROMPTS[0], seed=2, **hot) != first
    assert all(0 <= token < VOCABULARY for token in first[0])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], [3] * 65], "prompt 1 has 65 tokens, this engine takes 64"),
        ([[3], []], "prompt 1 is empty; it needs at least one token"),
        ([], "there is no prompt; a batch has at least one"),
        (["text"], r"has no tokenizer\.json; pass prompts as lists of token ids"),
        ("text", r"has no tokenizer\.json"),
        ([[3], [3, -1]], f"prompt 1 holds token id -1, expected 0 to {VOCABULARY - 1}"),
        ([[VOCABULARY]], f"prompt 0 holds token id {VOCABULARY}, expected 0 to {VOCABULARY - 1}"),
        ([[3.0]], r"prompt 0 holds 3\.0 \(float\), expected token ids: whole numbers"),
        ([[3, True]], r"prompt 0 holds True \(bool\), expected token ids"),
        ([[3, "4"]], "prompt 0 holds a str, expected token ids"),
        ([[[3]]], "prompt 0 holds a list, expected token ids"),
        ([3.0, 4], r"prompt 0 holds 3\.0 \(float\), expected token ids: whole numbers"),
        ([{"role": "user", "content": "x"}], r"has no tokenizer\.json"),
        ([iter([3])], "prompt 0 is <list_iterator .*, expected a string"),
        ({"role": "user", "content": "x"}, "prompts is .*'role'.*; pass a string, or a list"),
        (3, r"prompts is 3 \(int\), expected str or Sequence or Chat or Iterable"),
        (None, "there is no prompt; an encoder-decoder begins without one, if it has sources"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(engine: Engine, prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        [np.array([40, 41])],
        np.array([[40, 41]]),
        ((40, 41),),
        (prompt for prompt in [[np.int32(40), 41]]),
    ],
)
def test_prompts_and_token_ids_may_come_in_other_sequences(engine: Engine, prompts: Any) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    (answer,) = engine.generate(prompts, sampling=sampling)
    assert answer.token_ids == tokens(engine, [40, 41], max_tokens=4)[0]


def test_a_string_is_one_prompt(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for file in tiny_engine.engine.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    with open_engine(tmp_path) as engine:
        answer = engine.generate("w40 w41", sampling=sampling)
        assert [answer] == engine.generate(["w40 w41"], sampling=sampling)
        assert "".join(engine.stream("w40 w41", sampling=sampling)) == answer.text
        assert answer.token_ids == tokens(engine, [40, 41], max_tokens=4)[0]


@pytest.mark.parametrize("stops", [[3, VOCABULARY], {VOCABULARY}])
def test_a_stop_token_that_the_model_does_not_have_is_refused(
    engine: Engine, stops: Collection[int]
) -> None:
    message = f"stop_token_ids holds token id {VOCABULARY}, expected 0 to {VOCABULARY - 1}"
    with pytest.raises(ConfigError, match=message):
        tokens(engine, PROMPTS[0], stop_token_ids=stops)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_name_the_adapter_and_its_strength(
    engine: Engine, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=64, temperature=temperature, seed=0)
    shapes = {name: site.shape(f, 1) for name, (site, f) in engine.manifest.lora_bindings.items()}
    huge = {
        name: weight_of(name, tensor_from_numpy(np.full(shape, 1e30, np.float32)))
        for name, shape in shapes.items()
    }
    engine.adapters.add("huge", Adapter("huge", huge))
    with pytest.raises(OutputError, match=r"prompt 0.*adapter 'huge@0\.5': "):
        engine.generate(PROMPTS[:2], adapter="huge", scale=0.5, sampling=sampling)
    assert engine.generate(PROMPTS[:2], sampling=sampling)
    engine.adapters.unload("huge")


@pytest.fixture
def adapted(engine: Engine, tiny_engine: TinyEngine) -> Iterator[Engine]:
    engine.adapters.load("a", tiny_engine.adapter)
    engine.adapters.blend("strong", {"a": 8})
    yield engine
    engine.adapters.unload("a")


GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)


def test_each_prompt_has_its_own_adapter_whatever_others_have(adapted: Engine) -> None:
    """The engine takes one adapter at a time: each step has a run for each of them."""
    names = ["a@-8", None, "strong", "a@-8", "a@8", None]
    prompts = [PROMPTS[0]] * len(names)
    together = adapted.generate(prompts, adapter=names, sampling=GREEDY)
    alone = [adapted.generate(PROMPTS[0], adapter=name, sampling=GREEDY) for name in names]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert alone[2].token_ids == alone[4].token_ids
    assert len({one.token_ids for one in alone}) == 3
    assert adapted.adapters.stats.leased == 0


def test_a_strength_is_an_argument_or_a_part_of_the_name(adapted: Engine) -> None:
    found = [
        adapted.generate(PROMPTS[1], adapter="a", scale=8, sampling=GREEDY),
        adapted.generate(PROMPTS[1], adapter="a@8", sampling=GREEDY),
        *adapted.generate([PROMPTS[1]], adapter=["strong"], sampling=GREEDY),
    ]
    assert len({one.token_ids for one in found}) == 1
    with pytest.raises(AdapterError, match="a scale is inf, expected a finite number"):
        adapted.generate(PROMPTS[1], adapter="a", scale=float("inf"))


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"logprobs": 0}, {"logprob_token_ids": [3]}, {"prompt_logprobs": 0}]
)
def test_a_stream_is_the_text_of_one_answer(engine: Engine, fields: dict[str, Any]) -> None:
    pieces = engine.stream(PROMPTS[0], sampling=SamplingParams(**fields))
    with pytest.raises(ConfigError, match="a stream is the text of one answer; call generate"):
        next(pieces)


def test_several_answers_to_a_single_prompt_are_a_list(engine: Engine) -> None:
    several = SamplingParams(max_tokens=3, n=2, temperature=1, seed=1)
    with pytest.raises(ConfigError, match="n is 2; pass a list of prompts for a list of answers"):
        engine.generate(PROMPTS[0], sampling=several)
    found = engine.generate([PROMPTS[0]], sampling=several)
    assert [one.index for one in found] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": ["a"]}, "there are 1 adapter for 2 prompts; give one for each"),
        ({"adapter": 3}, r"adapter is 3 \(int\), expected str or Sequence or None"),
        ({"sampling": [SamplingParams()]}, "there are 1 sampling for 2 prompts"),
    ],
)
def test_adapters_and_parameters_are_one_or_one_for_each(
    engine: Engine, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(PROMPTS[:2], **options)


def test_adapters_are_those_of_an_open_engine(tiny_engine: TinyEngine) -> None:
    engine = open_engine(tiny_engine.engine)
    with pytest.raises(StateError, match="the engine is closed; use: with open_engine"):
        engine.adapters  # noqa: B018
    with engine:
        engine.adapters.load("a", tiny_engine.adapter)
        assert engine.adapters is engine.adapters
        assert repr(engine).endswith(", open>")
    with engine:
        assert engine.adapters.names == ()
    assert repr(engine).endswith(", closed>")


class Spoiled(FakeExecutor):
    """Answers what it is told to where the last token of a row is `spoiled`."""

    memory = HostMemory()

    def __init__(self, directory: Path, spoiled: int, value: float) -> None:
        super().__init__()
        self.directory, self.spoiled, self.value = directory, spoiled, value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        outputs = super().execute(tensor_map)
        logits = outputs["logits"].numpy()
        ids = self.calls[-1]["input_ids"].reshape(-1)[self.calls[-1]["kept"]]
        logits[ids == self.spoiled, 5] = self.value
        return outputs


class Interrupted(Spoiled):
    """In whose every run another thread's turn comes, and which then looks at a B."""

    meanwhile: Callable[[], object]

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.meanwhile()
        return {"b": tensor_map[f"lora_B_{self.manifest.sites[0].path}"]}


def test_a_run_keeps_the_strength_that_it_began_with(tmp_path: Path) -> None:
    executor: Any = Interrupted(tmp_path, 0, 0)
    weights = make_weights(executor.manifest)
    tensors = {name: weight_of(name, tensor_from_numpy(w)) for name, w in weights.items()}
    b = weights[f"lora_B_{executor.manifest.sites[0].path}"]
    with Engine(executor) as engine:
        engine.adapters.add("a", Adapter("a", tensors))
        engine.adapters.blend("x", {"a": 2})
        for before, after in ((2, 4), (4, 8)):
            executor.meanwhile = partial(engine.adapters.blend, "x", {"a": after}, replace=True)
            np.testing.assert_array_equal(engine.run({}, adapter="x")["b"], before * b)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_single_value_that_is_no_number_is_an_error_of_its_prompt(
    tmp_path: Path, value: float
) -> None:
    executor: Any = Spoiled(tmp_path, 7, value)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    with (
        Engine(executor) as engine,
        pytest.raises(OutputError, match=r"logits of prompt 1 are NaN or infinite with no adap"),
    ):
        engine.generate([[1], [6]], sampling=sampling)


def test_any_number_of_prompts_is_answered_in_turns(engine: Engine) -> None:
    prompts = [[3 + turn, 4, 5] for turn in range(3 * engine.manifest.max_batch_size + 1)]
    assert tokens(engine, *prompts) == [tokens(engine, prompt)[0] for prompt in prompts]
