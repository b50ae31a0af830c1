"""vLLM's `LLM`: its programs run, with answers of the adapters that their requests name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from support.fakes.slot_engine import POISON, SlotEngine, expected_answer, number_file
from tokenizers import Tokenizer, decoders, models

from trt_lora.plugins.errors import AdapterError, ConfigError, OutputError
from trt_lora.runtime.interfaces.vllm import LLM, LoRARequest, RequestOutput, SamplingParams, llm

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}Z"


class OpenedEngine(SlotEngine):
    """An engine directory whose tokens are the characters from `A` on."""

    def __init__(self, directory: Path, slots: int = 2) -> None:
        super().__init__(slots)
        self.directory, self.is_open = directory, False

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False


def characters(text: str) -> list[int]:
    return [ord(char) - ord("A") for char in text]


def text_of(tokens: list[int | None]) -> str:
    return "".join(chr(ord("A") + token) for token in tokens if token is not None)


@pytest.fixture
def engine(tmp_path: Path) -> OpenedEngine:
    made = Tokenizer(models.BPE({chr(ord("A") + n): n for n in range(97)}, []))
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5}')
    return OpenedEngine(tmp_path)


@pytest.fixture
def opened(engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: engine)
    with LLM(engine.directory, enable_lora=True) as found:
        yield found


def lora(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"lora {number}", number, str(number_file(folder, number)))


def test_the_program_of_vllms_page_runs(opened: LLM, tmp_path: Path) -> None:
    sampling_params = SamplingParams(temperature=0, max_tokens=256, stop=["YZ"])
    prompts = ["HELLO", "AGAIN"]
    outputs = opened.generate(prompts, sampling_params, lora_request=lora(tmp_path, 3))
    for output, prompt in zip(outputs, prompts, strict=True):
        params = replace(GREEDY, max_tokens=27, stop_token_ids=[2])  # the engine's own
        whole = expected_answer(characters(prompt), 3, params)
        answer = output.outputs[0]
        assert (output.prompt, output.prompt_token_ids) == (prompt, characters(prompt))
        assert answer.text == text_of(whole).partition("YZ")[0]
        assert answer.token_ids == whole[: len(answer.token_ids)]
        is_stopped = "YZ" in text_of(whole) or whole[-1] is None
        assert answer.finish_reason == ("stop" if is_stopped else "length")
        assert output.finished
        assert answer.finished()


def test_every_prompt_has_its_own_parameters_and_adapter_and_any_number_is_answered(
    opened: LLM, tmp_path: Path
) -> None:
    """More prompts than rows, and more adapters than slots."""
    numbers = [3, 0, 1, 2, 3, 1, 0, 2, 3]
    loras = [lora(tmp_path, number) if number else None for number in numbers]
    params = [replace(GREEDY, max_tokens=2 + at) for at in range(len(numbers))]
    prompts: list[Any] = [{"prompt": "HEY"}, [4, 5], {"prompt_token_ids": [6]}, *["ABC"] * 6]
    outputs = opened.generate(prompts, params, lora_request=loras)
    for at, output in enumerate(outputs):
        expected = expected_answer(output.prompt_token_ids, numbers[at], params[at])
        assert output.outputs[0].token_ids == expected
        assert output.lora_request == output.outputs[0].lora_request == loras[at]
    assert [output.prompt for output in outputs[:3]] == ["HEY", None, None]
    assert not opened._scheduler


def test_a_conversation_is_answered_by_its_template(opened: LLM) -> None:
    messages = [{"role": "user", "content": "HEY"}, {"role": "user", "content": "YOU"}]
    (one,) = opened.chat(messages, GREEDY)
    several = opened.chat([messages, messages[:1]], [GREEDY, GREEDY])
    assert one.prompt == "HEYYOUZ"
    assert one.outputs == several[0].outputs
    assert several[1].prompt_token_ids == characters("HEYZ")
    assert one.outputs[0].token_ids == expected_answer(characters("HEYYOUZ"), 0, GREEDY)


def test_a_conversation_goes_on_or_takes_variables_of_its_template(
    engine: OpenedEngine, request: pytest.FixtureRequest
) -> None:
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}{{ end }}"
    (engine.directory / "chat_template.jinja").write_text(template)
    opened: LLM = request.getfixturevalue("opened")  # which reads the template
    parts = [{"type": "text", "text": "HEY"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    (begun,) = opened.chat(messages, GREEDY, chat_template_kwargs={"end": "X"})
    (gone_on,) = opened.chat(
        messages, GREEDY, add_generation_prompt=False, continue_final_message=True
    )
    assert (begun.prompt, gone_on.prompt) == ("HEY!X", "HEY")
    with pytest.raises(ConfigError, match="pass add_generation_prompt=False"):
        opened.chat(messages, GREEDY, continue_final_message=True)


def test_parameters_are_by_default_the_models_over_vllms(opened: LLM) -> None:
    assert opened.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5)
    (output,) = opened.generate("HEY")
    assert len(output.outputs[0].token_ids) == 16


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_draws_without_a_seed_follow_from_the_seed_of_the_llm(
    engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: OpenedEngine(engine.directory))
    found = []
    for seed in (0, 0, 1):
        with LLM(engine.directory, seed=seed) as made:
            found.append(tokens_of(made.generate(["HEY", "HEY"], SamplingParams(temperature=2))))
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_no_two_answers_without_a_seed_have_the_same_one(opened: LLM) -> None:
    params = SamplingParams(temperature=9.0, n=3, max_tokens=9)
    outputs = opened.generate(["HEY", "HEY", "HEY"], params)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 9
    assert len({output.request_id for output in outputs}) == 3


def test_n_answers_have_draws_and_numbers_of_their_own(opened: LLM) -> None:
    params = SamplingParams(temperature=2.0, n=3, seed=5, max_tokens=9)
    (output,) = opened.generate("HEY", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    one_each = [opened.generate("HEY", replace(params, n=1, seed=5 + at)) for at in range(3)]
    assert tokens_of([output]) == [tokens for one in one_each for tokens in tokens_of(one)]


def test_log_probabilities_come_with_text_and_their_sum(opened: LLM) -> None:
    (output,) = opened.generate("HEY", replace(GREEDY, logprobs=2))
    (answer,) = output.outputs
    assert answer.logprobs is not None
    for known, token in zip(answer.logprobs, answer.token_ids, strict=True):
        assert known[token].rank == 1
        assert known[token].decoded_token == chr(ord("A") + token)
    chosen = [known[token].logprob for known, token in zip(answer.logprobs, answer.token_ids)]  # noqa: B905
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    (output,) = opened.generate("HEY", replace(GREEDY, logprob_token_ids=[3, 1]))
    listed = output.outputs[0]
    assert listed.token_ids == answer.token_ids
    assert listed.logprobs is not None
    for known, token in zip(listed.logprobs, listed.token_ids, strict=True):
        assert list(known) == list(dict.fromkeys([token, 3, 1]))
    plain = opened.generate("HEY", GREEDY)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_log_probabilities_of_a_prompt_come_with_text_and_none_for_its_first_token(
    opened: LLM,
) -> None:
    params = SamplingParams(temperature=2.0, n=2, seed=5, max_tokens=3, prompt_logprobs=1)
    (output,) = opened.generate("HEY", params)
    assert output.prompt_logprobs is not None
    first, *known = output.prompt_logprobs
    assert first is None
    for found, token in zip(known, characters("EY"), strict=True):
        assert found is not None
        assert found[token].decoded_token == chr(ord("A") + token)
        assert 1 in {one.rank for one in found.values()}
    plain = opened.generate("HEY", replace(params, prompt_logprobs=None))[0]
    assert plain.prompt_logprobs is None
    assert tokens_of([plain]) == tokens_of([output])


def test_the_adapter_asked_for_least_recently_is_unloaded(
    engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: engine)
    with LLM(engine.directory, enable_lora=True, max_cpu_loras=2) as made:
        for number in (1, 2, 1, 3):
            made.generate("HEY", GREEDY, lora_request=lora(tmp_path, number))
        assert set(made._engine.adapters.names) == {"lora 1", "lora 3"}
        (again,) = made.generate("HEY", GREEDY, lora_request=lora(tmp_path, 2))
    assert again.outputs[0].token_ids == expected_answer(characters("HEY"), 2, GREEDY)
    assert not engine.is_open


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda made, _: made.generate([]), r"prompts is \[\], expected text"),
        (lambda made, _: made.generate(5), r"prompts is 5 \(int\), expected str or"),
        (lambda made, _: made.generate({"text": "A"}), "a prompt has text, expected prompt or"),
        (lambda made, _: made.generate("A", [GREEDY] * 2), "2 sampling_params for 1 prompts"),
        (lambda made, _: made.generate("A", 5), "sampling_params is 5 .*, expected SamplingParams"),
        (lambda made, _: made.generate("A", [5]), "sampling_params has 5, expected SamplingParams"),
        (lambda made, _: made.generate("A", GREEDY, lora_request="x"), "lora_request is 'x'; give"),
        (lambda made, _: made.generate("A", GREEDY, lora_request=[5]), "lora_request is 5, expect"),
        (lambda made, _: made.generate(["A", [5, "x"]], GREEDY), "holds a str"),
        (lambda made, _: made.chat([]), r"messages is \[\], expected a conversation"),
    ],
)
def test_what_is_no_prompt_parameter_or_request_is_refused_and_nothing_waits(
    opened: LLM, tmp_path: Path, call: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(opened, tmp_path)
    assert not opened._scheduler
    assert opened.generate("HEY", GREEDY)[0].outputs[0].token_ids == (
        expected_answer(characters("HEY"), 0, GREEDY)
    )


def test_a_request_that_fails_ends_the_call_and_leaves_nothing_behind(
    opened: LLM, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="NaN or infinite"):
        opened.generate(["A", "B"], GREEDY, lora_request=[None, lora(tmp_path, POISON)])
    assert not opened._scheduler
    with pytest.raises(AdapterError, match=r"LoRA 90 is 'lora 90' from .*; give it a number"):
        opened.generate("A", GREEDY, lora_request=replace(lora(tmp_path, POISON), lora_name="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5}, "max_model_len is 5, this engine has 32"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', this engine is float32"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; an engine runs in one process"),
        ({"max_loras": 3}, "max_loras is 3, this engine has 2 slots"),
        ({"max_lora_rank": 8}, "max_lora_rank is 8, this engine takes adapters up to rank"),
        ({"max_num_seqs": 9}, "rows is 9, expected a whole number from 1 to 4"),
    ],
)
def test_an_option_that_the_engine_has_not_is_refused_and_it_is_closed(
    engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch, options: Any, message: str
) -> None:
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: engine)
    with pytest.raises(ConfigError, match=message):
        LLM(engine.directory, **options)
    assert not engine.is_open


def test_adapters_need_enable_lora(
    engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: engine)
    with (
        LLM(engine.directory) as made,
        pytest.raises(ConfigError, match="LoRA is not enabled! pass enable_lora=True"),
    ):
        made.generate("A", GREEDY, lora_request=lora(tmp_path, 1))


def test_without_a_tokenizer_token_ids_are_answered_and_text_is_refused(
    engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine.directory / "tokenizer.json").unlink()
    monkeypatch.setattr(llm, "open_executor", lambda model, backend: engine)
    with LLM(engine.directory) as made:
        (output,) = made.generate([[4, 5]], replace(GREEDY, logprobs=0))
        assert output.outputs[0].token_ids == expected_answer([4, 5], 0, GREEDY)
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
            made.generate("A")
