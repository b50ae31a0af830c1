"""What is listed beside an answer: chosen tokens, the prompt, times, and what was not run."""

from typing import Any

import pytest
from support.served_engines import Spoken
from support.web_server import CHATS, COMPLETIONS, Web, web_server

import trt_lora
from trt_lora.runtime import Engine, SamplingParams
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.answers.answering import AnswerOptions
from trt_lora.runtime.serving.serving_config import ServingConfig

PROMPT = [5, 6, 7, 8]
TALK = [{"role": "user", "content": "w5 w6 w7 w8"}]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
LISTED = [3, 96, 40]


def all_logprobs(twin: Engine) -> list[dict[int, float]]:
    """Of every token, at each step of the answer."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, logprobs=-1)
    (answer,) = twin.generate([PROMPT], adapter="a", sampling=sampling)
    assert answer.logprobs is not None
    return [{t: known.logprob for t, known in step.items()} for step in answer.logprobs]


def test_tokens_that_are_named_are_listed_and_no_others(web: Web, twin: Engine) -> None:
    asked: dict[str, Any] = {"model": "a", "logprob_token_ids": LISTED, **GREEDY}
    numbers = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = {"prompt": PROMPT, "logprobs": 5, **numbers, **asked}
    (choice,) = web.answer(COMPLETIONS, **body)["choices"]
    expected = [
        {f"token_id:{i}": known[i] for i in (token, *LISTED)}
        for token, known in zip(choice["token_ids"], all_logprobs(twin), strict=True)
    ]
    found = choice["logprobs"]["top_logprobs"]
    assert [list(step) for step in found] == [list(step) for step in expected]
    for step, wanted in zip(found, expected, strict=True):
        assert step == pytest.approx(wanted, abs=1e-5)
    streamed = [
        e["choices"][0]["logprobs"]["top_logprobs"] for e in web.events(COMPLETIONS, **body)
    ]
    for step, wanted in zip([s for steps in streamed for s in steps], found, strict=True):
        assert step == pytest.approx(wanted, abs=1e-5)
    (chat,) = web.answer(CHATS, messages=TALK, logprobs=True, **numbers, **asked)["choices"]
    lists = [
        {one["token"]: one["logprob"] for one in step["top_logprobs"]}
        for step in chat["logprobs"]["content"]
    ]
    for step, wanted in zip(lists, found, strict=True):
        assert step == pytest.approx(wanted, abs=1e-5)
    error = web.refusal(COMPLETIONS, **{**body, "logprob_token_ids": [97]})
    assert error["param"] == "logprob_token_ids"


def test_a_prompt_may_be_echoed_alone(web: Web) -> None:
    asked = {"prompt": "w5 w6 w7 w8", "echo": True, "logprobs": 1, **GREEDY}
    (whole,) = web.answer(COMPLETIONS, **asked)["choices"]
    body = web.answer(COMPLETIONS, **{**asked, "max_tokens": 0})
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("w5 w6 w7 w8", "length")
    assert choice["logprobs"] == {n: given[:4] for n, given in whole["logprobs"].items()}
    assert body["usage"]["prompt_tokens"] == 4
    (event,) = web.events(COMPLETIONS, **{**asked, "max_tokens": 0})
    assert event["choices"][0]["text"] == "w5 w6 w7 w8"
    assert event["choices"][0]["logprobs"] == choice["logprobs"]


def test_an_echo_is_the_text_as_it_was_given_and_none_beside_its_tokens(web: Web) -> None:
    texts = ["w5  w6", "w7\tw8"]  # which its tokens do not tell
    body = web.answer(COMPLETIONS, prompt=texts, echo=True, **GREEDY)
    assert all(c["text"].startswith(t) for c, t in zip(body["choices"], texts, strict=True))
    asked = {"prompt": "w5", "return_token_ids": True, **GREEDY}
    (plain,) = web.answer(COMPLETIONS, **asked)["choices"]
    (choice,) = web.answer(COMPLETIONS, echo=True, **asked)["choices"]
    assert choice["text"] == plain["text"]


def test_a_chat_echoes_the_message_that_goes_on(web: Web) -> None:
    parts = [{"type": "text", "text": text} for text in ("w5 w6", "w7")]
    asked: dict[str, Any] = {"messages": [{"role": "assistant", "content": parts}], **GREEDY}
    said = web.answer(CHATS, **asked)["choices"][0]["message"]["content"]
    body = web.answer(CHATS, echo=True, **asked)
    assert body["choices"][0]["message"]["content"] == "w5 w6\nw7" + said
    assert body["prompt_logprobs"][0] is None  # which vLLM has there, too
    first, echo, *rest = web.events(CHATS, echo=True, n=1, **asked)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert echo["choices"][0]["delta"] == {"content": "w5 w6\nw7"}
    assert "".join(e["choices"][0]["delta"]["content"] for e in rest) == said
    asked["messages"] = TALK
    assert web.answer(CHATS, echo=True, **asked)["choices"] == web.answer(CHATS, **asked)["choices"]
    user = web.answer(CHATS, echo=True, add_generation_prompt=False, **asked)
    assert user["choices"][0]["message"]["role"] == "user"
    assert user["choices"][0]["message"]["content"].startswith("w5 w6 w7 w8")


def test_the_text_that_a_template_writes_may_be_asked_for(web: Web) -> None:
    body = web.answer(CHATS, messages=TALK, return_prompt_text=True, **GREEDY)
    assert body["prompt_text"] == "w5 w6 w7 w8 "
    first, *rest = web.events(CHATS, messages=TALK, return_prompt_text=True, **GREEDY)
    assert first["prompt_text"] == "w5 w6 w7 w8 "
    assert not any("prompt_text" in event for event in rest)
    assert "prompt_text" not in web.answer(CHATS, messages=TALK, **GREEDY)


def test_a_prompt_is_cut_to_what_leaves_room_for_an_answer(web: Web, manifest: Manifest) -> None:
    most = manifest.max_seq_len
    long = [4 + n % 90 for n in range(most + 20)]
    kept: dict[str, Any] = {"prompt": long, "return_token_ids": True, **GREEDY}

    def found(**fields: Any) -> Any:
        (choice,) = web.answer(COMPLETIONS, **kept, **fields)["choices"]
        return choice["prompt_token_ids"]

    assert found(truncate_prompt_tokens=-1) == long[1 - most :]
    assert found(truncate_prompt_tokens=-1, truncation_side="right") == long[: most - 1]
    error = web.refusal(COMPLETIONS, truncate_prompt_tokens=most + 1, **kept)
    assert error["param"] == "truncate_prompt_tokens"


def test_what_makes_answers_is_named_where_they_end(web: Web, manifest: Manifest) -> None:
    name = f"trt-lora-{trt_lora.__version__}-{manifest.base_model.fingerprint[:8]}"
    for path, prompt in ((COMPLETIONS, {"prompt": PROMPT}), (CHATS, {"messages": TALK})):
        assert web.answer(path, **prompt, **GREEDY)["system_fingerprint"] == name
        for options in ({}, {"stream_options": {"include_usage": True}}):
            *events, last = web.events(path, **prompt, **GREEDY, **options)
            assert last["system_fingerprint"] == name
            assert not any("system_fingerprint" in event for event in events)


def test_the_packages_version_is_read_once_and_not_for_every_answer(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = web.answer(COMPLETIONS, prompt=PROMPT, **GREEDY)["system_fingerprint"]
    read = list[str]()
    monkeypatch.setattr("importlib.metadata.version", read.append)
    assert web.answer(COMPLETIONS, prompt=PROMPT, **GREEDY)["system_fingerprint"] == name
    assert not read


def test_a_stream_may_have_several_tokens_in_an_event(web: Web) -> None:
    asked = {"prompt": PROMPT, "return_token_ids": True, **GREEDY, "max_tokens": 8}
    (whole,) = web.answer(COMPLETIONS, **asked)["choices"]
    events = web.events(COMPLETIONS, stream_interval=3, **asked)
    ids = [event["choices"][0]["token_ids"] for event in events]
    assert all(len(some) >= 3 for some in ids[1:-1])  # more where they came together
    assert [i for some in ids for i in some] == whole["token_ids"]
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]


def test_usage_may_tell_what_was_not_run(spoken: Spoken) -> None:
    prompt = [4 + n for n in range(40)]
    for shares in (True, False):
        config = spoken.config(
            answers=AnswerOptions(tells_cached_tokens=True),
            serving=ServingConfig(rows=1, shares_prefixes=shares),
        )
        with web_server(config) as web:

            def cached(web: Web = web, **fields: Any) -> Any:
                usage = web.answer(COMPLETIONS, **{"prompt": prompt, **GREEDY, **fields})["usage"]
                return usage["prompt_tokens_details"]

            assert cached() == {"cached_tokens": 0}
            assert cached() == {"cached_tokens": 39 * shares}
            assert cached(n=2, temperature=1) == {"cached_tokens": 39 * shares}
            options = {"include_usage": True, "continuous_usage_stats": True}
            *events, last = web.events(COMPLETIONS, prompt=prompt, stream_options=options, **GREEDY)
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 39 * shares}
            assert not any("prompt_tokens_details" in event["usage"] for event in events)
            # The second answer begins with what the first has run.
            assert cached(prompt=prompt[::-1], n=2, temperature=1) == {"cached_tokens": 0}


TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms")


def test_an_answer_may_tell_how_long_it_took(spoken: Spoken) -> None:
    with web_server(spoken.config(answers=AnswerOptions(tells_times=True))) as web:
        found = web.answer(CHATS, messages=TALK, **GREEDY)["metrics"]
        assert found.keys() == {*TIMES, "tokens_per_second"}
        first, answering, queued, between = (found[name] for name in TIMES)
        assert between == pytest.approx(answering / 3)
        assert min(found.values()) >= 0
        assert found["tokens_per_second"] == pytest.approx(4000 / (first + answering), rel=1e-3)
        assert queued < 1000
        options = {"include_usage": True}
        *events, last = web.events(
            CHATS, messages=TALK, stream_options=options, **{**GREEDY, "max_tokens": 1}
        )
        assert last["metrics"].keys() == {*TIMES[:3], "tokens_per_second"}
        assert not any("metrics" in event for event in events)
        several = {"n": 2, **GREEDY, "temperature": 1}
        assert "metrics" not in web.answer(CHATS, messages=TALK, **several)
        assert "metrics" not in web.answer(COMPLETIONS, prompt=[PROMPT, [9]], **GREEDY)
