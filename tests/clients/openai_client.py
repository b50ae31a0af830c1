"""openai: whole answers and streams, at once and one after the other, log probabilities, errors."""

# pyright: reportMissingImports=false
import asyncio
from typing import Any

import openai
from clients.served import FEW, MESSAGES, PROMPT, Answer, Served, told

USAGE = {"include_usage": True}


def asks_and_streams(client: openai.OpenAI, model: str, expected: Answer) -> None:
    """Both routes, both ways."""
    whole = client.completions.create(model=model, prompt=PROMPT, **FEW)
    assert whole.choices[0].text == expected.completion
    assert whole.usage.completion_tokens == expected.completion_tokens
    *parts, last = client.completions.create(
        model=model, prompt=PROMPT, stream=True, stream_options=USAGE, **FEW
    )
    assert "".join(part.choices[0].text for part in parts) == expected.completion
    assert (last.choices, last.usage) == ([], whole.usage)
    chat = client.chat.completions.create(model=model, messages=MESSAGES, **FEW)
    assert chat.choices[0].message.content == expected.chat
    assert chat.usage.completion_tokens == expected.chat_tokens
    *parts, last = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options=USAGE, **FEW
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.chat
    assert parts[-1].choices[0].finish_reason == chat.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], chat.usage)


def has_log_probabilities(client: openai.OpenAI, model: str) -> None:
    """A chat lists them per token, and a completion that echoes has those of its prompt."""
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **FEW
    )
    listed = chat.choices[0].logprobs.content
    assert {len(one.top_logprobs) for one in listed} == {2}
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in listed)
    echo = client.completions.create(
        model=model, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    assert echo.choices[0].text.startswith(PROMPT)
    first, *rest = echo.choices[0].logprobs.token_logprobs
    assert first is None
    assert rest
    assert all(one <= 0 for one in rest)


async def asks_all_at_once(served: Served) -> None:
    """Streams of every model beside each other."""

    async def streamed(model: str) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, **FEW
        )
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async with openai.AsyncOpenAI(base_url=served.url, api_key="x", max_retries=0) as client:
        texts = await asyncio.gather(*map(streamed, served.answers))
    assert texts == [answer.chat for answer in served.answers.values()]


def is_refused(client: openai.OpenAI, kind: Any, **body: object) -> str:
    """Return the text of an error, which is of the class and the shape that it should have."""
    asked = {"messages": MESSAGES, **body}
    try:
        client.chat.completions.create(**asked)
    except kind as error:
        assert error.body.keys() == {"message", "type", "param", "code"}
        assert error.body["code"] == error.status_code
        return str(error.body["message"])
    raise AssertionError(f"{body} was answered")


def refusals_are_its_own_exceptions(client: openai.OpenAI, base: str) -> None:
    """By class, with our text."""
    text = is_refused(client, openai.NotFoundError, model="nobody")
    assert text.startswith("The model `nobody` does not exist.")
    text = is_refused(client, openai.BadRequestError, model=base, top_p=2)
    assert text.startswith("top_p is 2")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = is_refused(client, openai.BadRequestError, model=base, tools=[tool])
    assert text.startswith("tools is not supported")


if __name__ == "__main__":
    its = told()
    asking = openai.OpenAI(base_url=its.url, api_key="x", max_retries=0)
    assert [model.id for model in asking.models.list()] == [*its.answers]
    assert len({answer.chat for answer in its.answers.values()}) == len(its.answers)
    for name, answer in its.answers.items():
        asks_and_streams(asking, name, answer)
        has_log_probabilities(asking, name)
    asyncio.run(asks_all_at_once(its))
    refusals_are_its_own_exceptions(asking, its.base)
