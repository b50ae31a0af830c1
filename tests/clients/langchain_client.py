"""langchain-openai: `ChatOpenAI`, asked, streamed, in a batch, and with structured output."""

# pyright: reportMissingImports=false
import openai
from clients.fruit import Fruit
from clients.served import FEW, MESSAGES, PROMPT, TYPED, Answer, Served, told
from langchain_openai import ChatOpenAI


def chat_model(served: Served, name: str, **options: object) -> ChatOpenAI:
    """A model of LangChain, as its documentation says for servers of others."""
    return ChatOpenAI(model=name, base_url=served.url, api_key="x", max_retries=0, **options)


def asks_and_streams(model: ChatOpenAI, expected: Answer) -> None:
    """One message, both ways, and several beside each other."""
    answer = model.invoke(PROMPT)
    assert answer.content == expected.chat
    assert answer.usage_metadata["output_tokens"] == expected.chat_tokens
    *_, last = parts = [*model.stream(PROMPT, stream_usage=True)]
    assert "".join(part.content for part in parts) == expected.chat
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == (
        expected.chat_tokens
    ), last
    assert [one.content for one in model.batch([PROMPT, MESSAGES])] == [expected.chat] * 2


def structured(model: ChatOpenAI) -> None:
    """An answer of a type, by its JSON schema."""
    fruit = model.with_structured_output(Fruit, method="json_schema").invoke(PROMPT)
    assert isinstance(fruit, Fruit)


if __name__ == "__main__":
    its = told()
    for model_name, answered in its.answers.items():
        asks_and_streams(chat_model(its, model_name, **FEW), answered)
        structured(chat_model(its, model_name, **TYPED))
    try:
        chat_model(its, "nobody").invoke(PROMPT)
    except openai.NotFoundError as error:
        assert "The model `nobody` does not exist." in str(error)
    else:
        raise AssertionError("an unknown model was answered")
