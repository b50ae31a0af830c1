"""Tokens of an engine's loop for coroutines: what is left early leaves nothing behind."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.fakes.gated_engine import GatedEngine

from trt_lora.plugins.errors import StateError
from trt_lora.runtime import AdapterStore, SamplingParams, Scheduler, StructuredOutputsParams
from trt_lora.runtime.scaleout.token_streams import TokenStream, TokenStreams
from trt_lora.runtime.serving.engine_loop import EngineLoop

FEW = SamplingParams(temperature=0, max_tokens=3)


def streams_of(engine: GatedEngine) -> TokenStreams:
    """The streams of a loop over an engine."""
    return TokenStreams(Scheduler(engine, AdapterStore(engine)))


def test_a_prompt_that_is_left_while_its_grammar_is_compiled_is_never_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GatedEngine(tmp_path / "engine")
    begun, may_go_on = threading.Event(), threading.Event()
    real, submitted = EngineLoop.submit, list[int]()

    def slow(loop: EngineLoop, *args: Any, **options: Any) -> None:
        begun.set()
        may_go_on.wait(60)
        sampling = SamplingParams(temperature=0, max_tokens=3)
        submitted.extend(real(loop, args[0], sampling, **options))

    async def leaves() -> None:
        streams = streams_of(engine)
        engine.shut()
        monkeypatch.setattr(EngineLoop, "submit", slow)
        stream = TokenStream(streams)
        guided = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        asked = asyncio.create_task(streams.submit(stream, [1, 2], guided, adapter=None, salt=None))
        await asyncio.to_thread(begun.wait, 60)
        asked.cancel()
        await asyncio.wait({asked})
        stream.close()
        may_go_on.set()
        while not submitted:
            await asyncio.sleep(0.01)
        engine.let()
        assert streams._streams == {}
        await asyncio.to_thread(streams.loop.close, 60)
        assert stream.events.empty()

    asyncio.run(leaves())


def test_who_waits_for_a_loop_that_is_closed_is_told(tmp_path: Path) -> None:
    engine = GatedEngine(tmp_path / "engine")

    async def waits() -> None:
        streams = streams_of(engine)
        engine.shut()
        stream = TokenStream(streams)
        await streams.submit(stream, [1, 2], FEW, adapter=None, salt=None)
        closing = asyncio.create_task(asyncio.to_thread(streams.loop.close))
        await asyncio.sleep(0.05)
        engine.let()
        with pytest.raises(StateError, match="was closed before"):
            async for _ in stream.tokens():
                pass
        await closing
        with pytest.raises(StateError, match="is closed"):
            await streams.submit(stream, [1, 2], FEW, adapter=None, salt=None)

    asyncio.run(waits())
