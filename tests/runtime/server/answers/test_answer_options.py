"""What a server's flags say of all answers."""

import json

from support.models.tiny_sizes import VOCABULARY
from support.served_engines import MakeGated, Spoken
from support.web_server import CHATS, COMPLETIONS, web_server

from trt_lora.runtime.server.answers.answering import AnswerOptions

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}


def test_every_stream_may_tell_its_usage(spoken: Spoken) -> None:
    with web_server(spoken.config(answers=AnswerOptions(forces_usage=True))) as web:
        events = web.events(COMPLETIONS, prompt=PROMPT, **GREEDY)
        assert all("usage" in event for event in events)
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
        }


def test_every_token_may_be_called_by_its_number(spoken: Spoken) -> None:
    with web_server(spoken.config(answers=AnswerOptions(tokens_as_ids=True))) as web:
        (choice,) = web.answer(
            COMPLETIONS, prompt=PROMPT, logprobs=0, return_token_ids=True, **GREEDY
        )["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_more_or_fewer_log_probabilities_may_be_asked_for(spoken: Spoken) -> None:
    with web_server(spoken.config(answers=AnswerOptions(max_logprobs=2))) as web:
        assert web.answer(COMPLETIONS, prompt=PROMPT, logprobs=2, **GREEDY)
        message = web.refusal(COMPLETIONS, prompt=PROMPT, logprobs=3)["message"]
        assert message == "logprobs is 3, expected 0 to 2"
    with web_server(spoken.config(answers=AnswerOptions(max_logprobs=-1))) as web:
        asked = {"logprobs": -1, "prompt_logprobs": -1, "return_tokens_as_token_ids": True}
        (choice,) = web.answer(COMPLETIONS, prompt=PROMPT, **asked, **GREEDY)["choices"]
        of_all = {f"token_id:{token}" for token in range(VOCABULARY)}
        assert all(set(step) == of_all for step in choice["logprobs"]["top_logprobs"])
        assert all(len(step) == VOCABULARY for step in choice["prompt_logprobs"][1:])


def test_a_flag_makes_events_longer_for_all(spoken: Spoken) -> None:
    with web_server(spoken.config(answers=AnswerOptions(stream_interval=3))) as web:
        events = web.events(COMPLETIONS, prompt=PROMPT, return_token_ids=True, **GREEDY)
        assert len(events) <= 2  # the first token, and the other three
        asked = {**GREEDY, "max_tokens": 8, "stream_interval": 1}  # no less than the flag says
        assert len(web.events(COMPLETIONS, prompt=PROMPT, **asked)) <= 4


def test_a_stream_that_has_nothing_to_say_says_that_it_lives(make_gated: MakeGated) -> None:
    gated = make_gated(answers=AnswerOptions(keep_alive_s=0.02))
    gated.engine.shut()
    body = {"messages": [{"role": "user", "content": "w5"}], "stream": True, **GREEDY}
    seen: list[str] = []
    with gated.web.client.stream("POST", CHATS, json=body) as answer:
        for line in answer.iter_lines():
            seen.append(line)
            if seen.count(": keep-alive") == 3:
                gated.engine.let()
    assert seen[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:]) for line in seen[:-2] if line.startswith("data: ")]
    said = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert len(said.split()) == 4
