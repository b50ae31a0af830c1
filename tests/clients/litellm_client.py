"""litellm: `hosted_vllm/NAME`, whole and streamed, and its own exceptions."""

# pyright: reportMissingImports=false
import litellm
from clients.served import FEW, MESSAGES, Answer, told


def asks_and_streams(url: str, model: str, expected: Answer) -> None:
    """A chat, both ways, and a completion."""
    asked = {"model": f"hosted_vllm/{model}", "api_base": url, **FEW}
    chat = litellm.completion(messages=MESSAGES, **asked)
    assert chat.choices[0].message.content == expected.chat
    assert chat.usage.completion_tokens == expected.chat_tokens
    options = {"include_usage": True}
    parts = [*litellm.completion(messages=MESSAGES, stream=True, stream_options=options, **asked)]
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(texts) == expected.chat
    assert parts[-1].usage.completion_tokens == expected.chat_tokens


def refusals_are_its_own_exceptions(url: str, base: str) -> None:
    """By class, with our text."""
    for model, options, kind, text in (
        ("nobody", {}, litellm.NotFoundError, "The model `nobody` does not exist."),
        (base, {"top_p": 2}, litellm.BadRequestError, "top_p is 2"),
    ):
        try:
            litellm.completion(
                f"hosted_vllm/{model}", MESSAGES, api_base=url, max_retries=0, **options
            )
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{model}, {options} was answered")


if __name__ == "__main__":
    its = told()
    for name, answer in its.answers.items():
        asks_and_streams(its.url, name, answer)
    refusals_are_its_own_exceptions(its.url, its.base)
