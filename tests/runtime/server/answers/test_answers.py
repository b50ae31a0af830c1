"""Answers over HTTP: those of the engine, whole and in pieces, as vLLM words them."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.models.tiny_sizes import POSITIONS
from support.web_server import CHATS, COMPLETIONS, Web

from trt_lora.runtime import Completion, Engine, SamplingParams
from trt_lora.runtime.generation.text.prompts import Prompt

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
SAMPLING = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
MODELS = [("base", None), ("a", "a"), ("b", "b")]


def words(ids: Sequence[int | None]) -> str:
    return " ".join(f"w{token}" for token in ids)


def expected(twin: Engine, adapter: str | None, *prompts: Any, **options: Any) -> list[Completion]:
    """What the engine answers without HTTP; text is a user's, which the template leaves alone."""
    sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 8, **options})
    several: list[Prompt] = list(prompts)
    return twin.generate(several, adapter=adapter, sampling=sampling)


def completed(web: Web, **body: Any) -> Any:
    return web.answer(COMPLETIONS, **{"prompt": PROMPT, **GREEDY, **body})


def chatted(web: Web, **body: Any) -> Any:
    messages = [{"role": "user", "content": words(PROMPT)}]
    return web.answer(CHATS, **{"messages": messages, **GREEDY, **body})


def test_adapters_answer_each_as_they_should(twin: Engine) -> None:
    """What the other tests rely on."""
    answers = [expected(twin, adapter, PROMPT)[0].token_ids for _, adapter in MODELS]
    assert len(set(answers)) == 3
    assert {len(answer) for answer in answers} == {8}


@pytest.mark.parametrize(("model", "adapter"), MODELS)
def test_a_completion_is_the_engines(
    web: Web, twin: Engine, model: str, adapter: str | None
) -> None:
    (answer,) = expected(twin, adapter, words(PROMPT))
    for prompt in (PROMPT, words(PROMPT)):
        body = completed(web, model=model, prompt=prompt, return_token_ids=True)
        (choice,) = body["choices"]
        assert choice["token_ids"] == list(answer.token_ids)
        assert choice["prompt_token_ids"] == PROMPT
        assert (choice["text"], choice["finish_reason"]) == (answer.text, "length")
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
        assert (body["object"], body["model"]) == ("text_completion", model)
        assert body["id"].startswith("cmpl-")


@pytest.mark.parametrize(("model", "adapter"), MODELS)
def test_a_chat_is_the_engines(web: Web, twin: Engine, model: str, adapter: str | None) -> None:
    (answer,) = expected(twin, adapter, words(PROMPT))
    body = chatted(web, model=model)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer.text}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    assert (body["object"], body["model"]) == ("chat.completion", model)
    assert body["id"].startswith("chatcmpl-")


def test_what_is_streamed_adds_up_to_the_whole(web: Web) -> None:
    for model, _ in MODELS:
        whole = completed(web, model=model, return_token_ids=True)["choices"][0]
        events = web.events(
            COMPLETIONS, prompt=PROMPT, model=model, return_token_ids=True, **GREEDY
        )
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
        assert [c["finish_reason"] for c in choices] == [*[None] * (len(choices) - 1), "length"]
        assert {(e["object"], e["model"]) for e in events} == {("text_completion", model)}
        assert len({event["id"] for event in events}) == 1
        assert not any("usage" in event for event in events)


def test_a_chat_that_is_streamed_says_once_who_speaks(web: Web) -> None:
    whole = chatted(web, model="a")["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": words(PROMPT)}]
    first, *rest = web.events(CHATS, messages=messages, model="a", **GREEDY)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    deltas = [event["choices"][0]["delta"] for event in rest]
    assert all(delta.keys() == {"content"} for delta in deltas)
    assert "".join(delta["content"] for delta in deltas) == whole
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_tells_its_usage_where_that_is_asked_for(web: Web) -> None:
    def streamed(**options: Any) -> list[Any]:
        return web.events(COMPLETIONS, prompt=[PROMPT, [9]], stream_options=options, **GREEDY)

    usage = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    *events, last = streamed(include_usage=True)
    assert (last["choices"], last["usage"]) == ([], usage)
    assert not any("usage" in event for event in events)
    *events, last = streamed(include_usage=True, continuous_usage_stats=True)
    for index, prompt_tokens in ((0, 4), (1, 1)):  # in between, of the answer that goes on
        of_choice = [e["usage"] for e in events if e["choices"][0]["index"] == index]
        counts = [u["completion_tokens"] for u in of_choice]
        assert (sorted(set(counts)), counts[-1]) == (counts, 8)
        assert {u["prompt_tokens"] for u in of_choice} == {prompt_tokens}
    assert last["usage"] == usage
    for options in ({"include_usage": False}, {"continuous_usage_stats": True}):
        assert not any("usage" in event for event in streamed(**options))


def test_a_prompt_may_have_several_answers_which_its_seed_decides(web: Web, twin: Engine) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.5}
    answers = expected(twin, "a", PROMPT, **options)
    assert len({answer.token_ids for answer in answers}) == 3
    body = completed(web, model="a", return_token_ids=True, **options)
    assert [c["token_ids"] for c in body["choices"]] == [list(a.token_ids) for a in answers]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 24
    messages = [{"role": "user", "content": words(PROMPT)}]
    events = web.events(CHATS, messages=messages, model="a", **{**GREEDY, **options})
    said = ["", "", ""]
    roles = [0, 0, 0]
    for event in events:
        (choice,) = event["choices"]
        said[choice["index"]] += choice["delta"]["content"]
        roles[choice["index"]] += "role" in choice["delta"]
    assert said == [choice["text"] for choice in body["choices"]]
    assert roles == [1, 1, 1]


LONG = [4 + n % 90 for n in range(POSITIONS - 3)]


def test_prompts_of_a_list_are_answered_in_their_order_as_if_alone(web: Web, twin: Engine) -> None:
    """One that leaves little room takes none from the others."""
    prompts = [PROMPT, LONG, [40], [41, 42]] * 2
    answers = expected(twin, "b", *prompts)
    body = completed(web, model="b", prompt=prompts, return_token_ids=True)
    found = [choice["token_ids"] for choice in body["choices"]]
    assert found == [list(answer.token_ids) for answer in answers]
    assert [len(ids) for ids in found] == [8, 3, 8, 8] * 2
    texts = completed(web, model="b", prompt=[words(prompt) for prompt in prompts])
    assert [c["text"] for c in texts["choices"]] == [c["text"] for c in body["choices"]]


def test_text_that_is_too_long_is_refused_with_both_numbers(web: Web) -> None:
    error = web.refusal(COMPLETIONS, prompt=list(range(3, 3 + POSITIONS + 1)))
    assert error["param"] == "prompt"
    assert f"has {POSITIONS + 1} tokens" in error["message"]
    assert f"takes {POSITIONS}" in error["message"]
    messages = [{"role": "user", "content": "w5 " * (POSITIONS + 1)}]
    assert web.refusal(CHATS, messages=messages)["param"] == "messages"
    kept = completed(web, prompt=[9] * 90 + PROMPT, truncate_prompt_tokens=4)
    assert kept["choices"][0]["text"] == completed(web)["choices"][0]["text"]


# ------------------------------------------------------------------------------------ where it ends


def test_a_stop_string_ends_the_text_and_is_named(web: Web) -> None:
    said = completed(web)["choices"][0]["text"]
    stop = said.split()[3]
    assert said.split().index(stop) == 3
    before = said[: said.index(stop)]
    choice = completed(web, stop=["nothing", stop])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    assert choice["stop_reason"] == stop
    choice = completed(web, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == before + stop
    *events, last = web.events(COMPLETIONS, prompt=PROMPT, stop=stop, **GREEDY)
    assert "".join(e["choices"][0]["text"] for e in (*events, last)) == before
    assert last["choices"][0]["stop_reason"] == stop
    assert not any("stop_reason" in event["choices"][0] for event in events)


def test_a_stop_token_is_counted_and_told_and_has_no_text(web: Web) -> None:
    whole = completed(web, return_token_ids=True, logprobs=1)["choices"][0]
    ids = whole["token_ids"]
    asked = {"stop_token_ids": [ids[3]], "return_token_ids": True, "logprobs": 1}
    body = completed(web, **asked)
    (choice,) = body["choices"]
    assert choice["token_ids"] == ids[:4]
    assert choice["text"] == " " + words(ids[:3])
    assert choice["logprobs"] == {name: given[:4] for name, given in whole["logprobs"].items()}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    assert body["usage"]["completion_tokens"] == 4
    events = web.events(COMPLETIONS, prompt=PROMPT, **{**GREEDY, **asked})
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == ids[:4]


# ---------------------------------------------------------------------------- log probabilities


def test_lm_eval_finds_the_log_probabilities_of_a_text(web: Web, twin: Engine) -> None:
    """What lm-eval 0.4.13 asks `local-completions` for, and how it reads the answer."""
    body = completed(web, model="a", prompt=PROMPT, max_tokens=1, logprobs=1, echo=True, seed=1234)
    found = body["choices"][0]["logprobs"]
    (answer,) = expected(twin, "a", PROMPT, max_tokens=1, logprobs=1, prompt_logprobs=1)
    assert answer.prompt_logprobs is not None
    values = [
        known and known[token].logprob
        for token, known in zip(PROMPT, answer.prompt_logprobs, strict=True)
    ]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:4] == pytest.approx(values[1:])
    for best, known in zip(found["top_logprobs"][1:4], answer.prompt_logprobs[1:], strict=True):
        assert best.keys() == {f"w{token}" for token in known or ()}
    assert found["tokens"][:4] == words(PROMPT).split()
    assert found["text_offset"] == [0, 2, 4, 6, 8]
    assert all(len(found[name]) == 5 for name in found)
    assert body["choices"][0]["text"].startswith(words(PROMPT))
    context = 2
    for token, value, best in zip(
        *(found[name][context:-1] for name in ("tokens", "token_logprobs", "top_logprobs")),
        strict=True,
    ):
        assert best[token] == value <= max(best.values())


def test_log_probabilities_that_are_streamed_add_up_to_the_whole(web: Web) -> None:
    for echo in (False, True):
        body = {"prompt": PROMPT, "logprobs": 2, "echo": echo, **GREEDY}
        whole = web.answer(COMPLETIONS, **body)["choices"][0]["logprobs"]
        found: dict[str, list[Any]] = {name: [] for name in whole}
        for event in web.events(COMPLETIONS, **body):
            for name, values in event["choices"][0]["logprobs"].items():
                found[name] += values
        assert found == whole


def test_a_chat_lists_the_best_tokens_beside_each(web: Web, twin: Engine) -> None:
    (answer,) = expected(twin, None, PROMPT, logprobs=3)
    content = chatted(web, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == words(answer.token_ids).split()
    assert answer.logprobs is not None
    for one, known, token in zip(content, answer.logprobs, answer.token_ids, strict=True):
        assert one["logprob"] == pytest.approx(known[token].logprob)
        assert one["bytes"] == list(one["token"].encode())
        best = [other["logprob"] for other in one["top_logprobs"]]
        assert (len(best), best) == (3, sorted(best, reverse=True))
        assert one["top_logprobs"][0]["token"] == one["token"]  # it is greedy
    bare = chatted(web, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in bare] == [[]] * 8
    assert chatted(web)["choices"][0]["logprobs"] is None


def test_the_log_probabilities_of_a_prompt_are_told_by_token_and_rank(
    web: Web, twin: Engine
) -> None:
    (answer,) = expected(twin, "b", PROMPT, prompt_logprobs=2)
    assert answer.prompt_logprobs is not None
    for body in (
        completed(web, model="b", prompt_logprobs=2)["choices"][0],
        chatted(web, model="b", prompt_logprobs=2),
    ):
        first, *found = body["prompt_logprobs"]
        assert first is None
        for known, told in zip(answer.prompt_logprobs[1:], found, strict=True):
            assert known is not None
            assert {int(token) for token in told} == set(known)
            for token, one in told.items():
                assert one["logprob"] == pytest.approx(known[int(token)].logprob)
                assert one["rank"] == known[int(token)].rank
                assert one["decoded_token"] == f"w{token}"


def test_tokens_may_be_called_by_their_numbers(web: Web) -> None:
    options = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = completed(web, **options)["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(n in b for n, b in zip(names, choice["logprobs"]["top_logprobs"], strict=True))


def test_a_number_of_the_client_becomes_the_answers(web: Web) -> None:
    assert completed(web, request_id="mine")["id"] == "cmpl-mine"
    assert chatted(web, request_id="mine")["id"] == "chatcmpl-mine"
    headers = {"x-request-id": "theirs"}
    for path, prefix in ((COMPLETIONS, "cmpl"), (CHATS, "chatcmpl")):
        body = {"prompt": PROMPT, "messages": [{"role": "user", "content": "w5"}], **GREEDY}
        response = web.client.post(path, json=body, headers=headers)
        assert response.json()["id"] == f"{prefix}-theirs"
