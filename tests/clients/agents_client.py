"""openai-agents: the model of chat completions, run, streamed, and with an output type."""

# pyright: reportMissingImports=false
import asyncio
from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from clients.fruit import Fruit
from clients.served import FEW, PROMPT, TYPED, Served, told


async def runs(served: Served) -> None:
    """An agent of every model; without instructions it sends the message alone."""
    client = openai.AsyncOpenAI(base_url=served.url, api_key="x", max_retries=0)

    def agent(name: str, sampling: dict[str, Any] = FEW, **fields: object) -> Agent:
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        known = {name: sampling[name] for name in ("temperature", "max_tokens")}
        more = {"seed": sampling.get("seed")}
        settings = ModelSettings(include_usage=True, extra_body=more, **known)
        return Agent(name=name, model=model, model_settings=settings, **fields)

    for name, expected in served.answers.items():
        result = await Runner.run(agent(name), PROMPT)
        assert result.final_output == expected.chat
        (response,) = result.raw_responses
        assert response.usage.output_tokens == expected.chat_tokens
        streamed = Runner.run_streamed(agent(name), PROMPT)
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == expected.chat
        assert "raw_response_event" in kinds
        result = await Runner.run(agent(name, TYPED, output_type=Fruit), PROMPT)
        assert isinstance(result.final_output, Fruit)
    try:
        await Runner.run(agent("nobody"), PROMPT)
    except openai.NotFoundError as error:
        assert "The model `nobody` does not exist." in str(error)
    else:
        raise AssertionError("an unknown model was answered")


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(runs(told()))
