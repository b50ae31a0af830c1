"""What a body asks for: as parameters, or refused by the name of the field."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.answer_bodies import KINDS, MODEL, body, look_at_all_of, refusal, sampling

from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.server.answers.bodies import AnswerBody, ChatBody, CompletionBody


def test_what_a_body_does_not_say_the_model_does() -> None:
    assert sampling() == replace(MODEL, max_tokens=16)  # vLLM's default of completions
    assert sampling(ChatBody) == replace(MODEL, max_tokens=None)  # as many as there is room for
    given = {"temperature": 0, "top_p": None, "seed": None, "stop": None, "max_tokens": 3}
    assert sampling(**given) == replace(MODEL, temperature=0, max_tokens=3)


FIELDS: dict[str, Any] = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "seed": (1 << 63) - 1,
    "stop": ["x", "y"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "min_tokens": 2,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [4, 5, 6],
    "bad_words": ["no"],
    "prompt_logprobs": 3,
    "max_tokens": 9,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FIELDS)
def test_each_field_reaches_the_engine(kind: type[AnswerBody], name: str) -> None:
    found = sampling(kind, **{name: FIELDS[name]})
    expected = replace(sampling(kind), **{name: FIELDS[name]})
    assert found == expected
    assert found != sampling(kind)


def test_biases_are_by_token() -> None:
    assert sampling(logit_bias={"5": -100, "7": 0.5}).logit_bias == {5: -100, 7: 0.5}
    assert sampling(logit_bias={}).logit_bias is None
    for key in ("x", "", "5.5", "-1"):
        assert refusal(logit_bias={key: 1}).param == "logit_bias"


def test_openais_newer_name_of_the_length_goes_first() -> None:
    assert sampling(ChatBody, max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert sampling(ChatBody, max_tokens=9).max_tokens == 9


def test_log_probabilities_are_a_number_of_completions_and_two_fields_of_chats() -> None:
    assert sampling(logprobs=0).logprobs == 0
    assert sampling(logprobs=5).logprobs == 5
    assert sampling(ChatBody, logprobs=True).logprobs == 0
    assert sampling(ChatBody, logprobs=True, top_logprobs=5).logprobs == 5
    assert sampling(ChatBody, logprobs=False, top_logprobs=0).logprobs is None
    error = refusal(ChatBody, top_logprobs=5)
    assert (error.param, "`logprobs` must be set to true" in str(error)) == ("top_logprobs", True)
    assert sampling(echo=True, logprobs=2).prompt_logprobs == 2
    assert sampling(echo=True).prompt_logprobs is None
    assert sampling(logprobs=2).prompt_logprobs is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("n", 16, 17),
        ("stop", ["x"] * 16, ["x"] * 17),
        ("stop", "x" * 1000, "x" * 1001),
        ("stop", ["y", "x" * 1000], ["y", "x" * 1001]),
        ("logit_bias", {str(n): 1 for n in range(1024)}, {str(n): 1 for n in range(1025)}),
        ("prompt_logprobs", 20, 21),
        ("request_id", "x" * 256, "x" * 257),
    ],
    ids=["n", "stops", "stop", "a stop", "biases", "prompt_logprobs", "request_id"],
)
def test_a_field_has_a_most(kind: type[AnswerBody], name: str, most: Any, more: Any) -> None:
    assert sampling(kind, **{name: most})
    assert refusal(kind, **{name: more}).param == name


def test_log_probabilities_have_a_most_that_the_server_says() -> None:
    assert refusal(logprobs=21).param == "logprobs"
    assert str(refusal(ChatBody, logprobs=True, top_logprobs=21)).startswith("top_logprobs is 21")
    assert body(logprobs=30).sampling(MODEL, 30).logprobs == 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, -1)),
        *(("max_tokens", value) for value in (0, -1)),
        *(("temperature", value) for value in (-0.1, -1)),
        *(("top_p", value) for value in (0, 2, -1)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("presence_penalty", value) for value in (-2.1, 2.1)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1)),
        ("repetition_penalty", 0),
        ("top_k", -2),
        ("seed", 1 << 70),
        ("min_tokens", -1),
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["x", ""]),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        *(("cache_salt", value) for value in ("", "x" * 129, "a/b", "a@b", "a\\b", "a\0b")),
        *(("logprob_token_ids", value) for value in ([5], [*range(129)])),
        ("stream_options", {"include_usage": True}),  # nothing is streamed
        ("modalities", ["text", "audio"]),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(
    kind: type[AnswerBody], name: str, value: Any
) -> None:
    error = refusal(kind, **{name: value})
    assert error.param == name
    assert name in str(error)


REFUSED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "audio": {"voice": "x"},
    "mm_processor_kwargs": {"x": 1},
    "media_io_kwargs": {"x": {}},
    "logits_processors": ["x"],
    "kv_transfer_params": {"x": 1},
    "ec_transfer_params": {"x": 1},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "vllm_xargs": {"x": 1},
    "watermarking": True,
    "return_weight_versions": True,
    "priority": 5,
    "guided_json": {"type": "object"},
    "guided_choice": ["x"],
    "chat_template": "{{ 7 * 7 }}",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_name_and_nothing_is_not(
    kind: type[AnswerBody], name: str
) -> None:
    error = refusal(kind, **{name: REFUSED[name]})
    assert error.param == name
    assert str(error).startswith(f"{name} is not supported: ")
    nothing = type(REFUSED[name])()
    assert sampling(kind, **{name: nothing}) == sampling(kind, **{name: None}) == sampling(kind)


def test_one_beam_is_the_best_token_each_time() -> None:
    assert sampling(use_beam_search=True, temperature=2) == sampling(temperature=0)
    assert refusal(use_beam_search=True, n=2).param == "n"


NULLS = ("stream", "n", "skip_special_tokens", "echo", "return_token_ids", "stream_interval")


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_what_a_body_does_not_say(kind: type[AnswerBody]) -> None:
    assert sampling(kind, **dict.fromkeys(NULLS)) == sampling(kind)
    nothing: dict[str, Any] = {
        "logprobs": None,
        "stream_options": {},
        "return_tokens_as_token_ids": None,
    }
    assert sampling(kind, **nothing) == sampling(kind)
    asked = {"include_usage": None, "continuous_usage_stats": None}
    assert body(kind, stream=True, stream_options=asked).sampling(MODEL, 20) == sampling(kind)


def test_biases_are_bounded_as_in_vllm() -> None:
    assert sampling(logit_bias={"5": 1e9, "7": -101}).logit_bias == {5: 100, 7: -100}


def test_tokens_may_be_listed_instead_of_the_best() -> None:
    for kind, asked in ((CompletionBody, 5), (ChatBody, True)):
        found = sampling(kind, logprobs=asked, logprob_token_ids=[7, 5, 7])
        assert (found.logprobs, found.logprob_token_ids) == (None, (7, 5))
        plain = sampling(kind, logprobs=asked, logprob_token_ids=[])
        assert plain.listed_logprobs == sampling(kind, logprobs=asked).logprobs


def test_a_stream_has_no_place_for_the_log_probabilities_of_a_prompt() -> None:
    for kind in KINDS:
        assert refusal(kind, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert sampling(ChatBody, echo=True).prompt_logprobs == 0
    assert sampling(ChatBody, echo=True, logprobs=True, top_logprobs=3).prompt_logprobs == 3
    assert sampling(ChatBody, echo=True, stream=True).prompt_logprobs is None
    assert sampling(echo=True, logprobs=2, prompt_logprobs=1).prompt_logprobs == 1


def test_a_prompt_alone_is_echoed_by_an_answer_of_nothing() -> None:
    made = body(echo=True, max_tokens=0)
    assert (made.sampling(MODEL, 20).max_tokens, made.has_no_answer) == (1, True)
    assert not body(echo=True).has_no_answer
    assert refusal(max_tokens=0).param == "max_tokens"
    assert refusal(ChatBody, echo=True, max_tokens=0).param == "max_tokens"


def test_documents_and_effort_are_variables_of_the_template() -> None:
    def variables(**fields: Any) -> Any:
        (chat,) = body(ChatBody, **fields).prompts()
        return chat.chat_template_kwargs

    assert variables() == {}
    assert variables(documents=[{"text": "x"}]) == {"documents": [{"text": "x"}]}
    assert variables(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True}
    own = {"enable_thinking": True, "reasoning_effort": "high"}
    wanted = {"enable_thinking": True, "reasoning_effort": "none"}
    assert variables(reasoning_effort="none", chat_template_kwargs=own) == wanted
    assert variables(reasoning_effort="none")["enable_thinking"] is False
    assert refusal(ChatBody, reasoning_effort="much").param == "body.reasoning_effort"


def test_the_last_message_is_echoed_where_its_speaker_goes_on() -> None:
    def echoed(content: Any, **fields: Any) -> Any:
        messages = [{"role": "assistant", "content": content}]
        made = body(ChatBody, messages=messages, echo=True, **fields)
        return made.role, made.echoed

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert echoed("a") == ("assistant", "a")
    assert echoed(parts) == ("assistant", "a\nb")
    assert body(ChatBody, echo=True).echoed == ""  # a user's
    made = body(ChatBody, echo=True, add_generation_prompt=False)
    assert (made.role, made.echoed) == ("user", "hello")
    assert body(ChatBody, add_generation_prompt=False).echoed == ""


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["x"] * 64, ["x"] * 64),
        ([5] * 65, [[5] * 65]),
    ],
)
def test_a_completion_has_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    assert body(prompt=given).prompts() == prompts


@pytest.mark.parametrize(
    "given", [[], ["x"] * 65, [[5]] * 65, [None], [1.5], ["x", 5], [{}], [["x"], None]]
)
def test_other_prompts_are_refused(given: Any) -> None:
    assert refusal(prompt=given).param == "prompt"


def test_a_chat_is_one_conversation() -> None:
    given = {"add_generation_prompt": False, "chat_template_kwargs": {"thinks": True}}
    (chat,) = body(ChatBody, **given).prompts()
    assert chat == Chat(
        [{"role": "user", "content": "hello"}],
        add_generation_prompt=False,
        chat_template_kwargs={"thinks": True},
    )
    picture = [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    for messages in (
        [],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": picture}],
    ):
        assert refusal(ChatBody, messages=messages).param == "messages"
    assert refusal(ChatBody, chat_template_kwargs={"messages": []}).param == "messages"


def test_every_field_that_is_refused_or_passed_on_is_one_of_a_body() -> None:
    names = {field.name for field in msgspec.structs.fields(AnswerBody)}
    assert names >= FIELDS.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("field", "value", "is_taken"),
    [
        *(
            ("best_of", 1, True),
            ("best_of", 2, False),
            ("suffix", "", True),
            ("suffix", "x", False),
        ),
        *(("tool_choice", "none", True), ("tool_choice", "auto", True)),
        *(("tool_choice", "required", False), ("tool_choice", {"type": "function"}, False)),
        *(("modalities", ["text"], True), ("modalities", ["audio"], False)),
        *(("thinking_token_budget", -1, True), ("thinking_token_budget", 0, False)),
        *(("prompt_embeds", None, True), ("prompt_embeds", "AAAA", False)),
    ],
)
def test_what_is_not_done_is_refused_where_it_asks_for_something(
    field: str, value: object, is_taken: bool
) -> None:
    if is_taken:
        look_at_all_of(CompletionBody, {field: value})
    else:
        assert refusal(**{field: value}).param == field


def test_a_conversation_is_no_prompt_of_a_completion() -> None:
    message = {"role": "user", "content": "hi"}
    for prompt in ([[message]], [[1], [message]], [["a"]]):
        assert refusal(prompt=prompt).param == "prompt"
