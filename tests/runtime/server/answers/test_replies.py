"""Events of text alone, which are most of a stream and made by a shorter way, are as all others."""

import json
from typing import Any

import pytest

from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.answers.choices import Choice
from trt_lora.runtime.server.answers.encoding import EncodedPrompt
from trt_lora.runtime.server.answers.replies import Reply

TEXTS = (" word", '"', '"text":""', "", "\n\\", "é€😀", "\x00</script>")
PROMPT = EncodedPrompt([1])
NO_TOKENIZER: Any = None  # nothing here is turned into text


@pytest.mark.parametrize("body", [CompletionBody(prompt="x"), ChatBody(messages=[])])
@pytest.mark.parametrize("model", ["base", 'a:"text":""', ""])
def test_an_event_has_its_text_its_choice_and_no_more(
    body: CompletionBody | ChatBody, model: str
) -> None:
    reply = Reply(NO_TOKENIZER, model, body, request_id='id""')
    is_chat = isinstance(body, ChatBody)
    choice = Choice(PROMPT, tokens=[Token(0, 1, text="first")])
    for index in (0, 2, 0):
        for text in TEXTS:
            new = [Token(0, 1, text=text), Token(0, 1, text="!")]
            choice.tokens += new
            event = reply.chunk(index, choice, new, None)
            value = json.loads(event.removeprefix(b"data: "))
            assert event.endswith(b"}\n\n")
            assert value["choices"] == [
                {
                    "index": index,
                    **({"delta": {"content": f"{text}!"}} if is_chat else {"text": f"{text}!"}),
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
            assert (value["id"], value["model"]) == (f'{"chat" * is_chat}cmpl-id""', model)
            assert value["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
            assert value.keys() == {"id", "object", "created", "model", "choices"}


def test_what_has_more_than_text_is_told_in_full() -> None:
    new = [Token(0, 7, text=" word")]
    choice, counted = Choice(PROMPT, tokens=[Token(0, 1), *new]), {"total_tokens": 3}
    plain = Reply(NO_TOKENIZER, "base", CompletionBody(prompt="x"), request_id="1")
    with_ids = CompletionBody(prompt="x", return_token_ids=True)
    reply = Reply(NO_TOKENIZER, "base", with_ids, request_id="1")
    assert json.loads(plain.chunk(0, choice, new, counted)[6:])["usage"] == counted
    assert json.loads(reply.chunk(0, choice, new, None)[6:])["choices"][0]["token_ids"] == [7]
    last = [Token(0, None, "stop", stop_token=2)]
    choice.tokens += last
    assert json.loads(plain.chunk(0, choice, last, None)[6:])["choices"][0]["stop_reason"] is None


def test_the_first_event_of_an_answer_is_that_though_more_tokens_have_come() -> None:
    """They may have come with it, and have no text yet."""
    body = CompletionBody(prompt="x", echo=True, return_token_ids=False)
    reply = Reply(NO_TOKENIZER, "base", body, request_id="1")
    new = [Token(0, 7, text=" a"), Token(0, 8), Token(0, 9, text=" b")]
    choice = Choice(EncodedPrompt([1], "x"), tokens=new)
    events = [reply.chunk(0, choice, some, None) for some in (new[:1], new[1:])]
    assert [json.loads(e[6:])["choices"][0]["text"] for e in events] == ["x a", " b"]
