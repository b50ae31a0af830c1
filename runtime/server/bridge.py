"""EngineBridge: an `EngineLoop` behind an event loop of asyncio, a call into it for each step."""

import asyncio
from collections.abc import Sequence

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.serving.scheduler import Scheduler

Event = tuple[int, Token | BaseException]  # of an answer: its index, and what it was given


class EngineBridge:
    """Submits requests, and brings the tokens of a step to those that wait for them.

    All methods are called in the event loop's thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Start the engine's thread; an event loop runs."""
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, tuple[Answers, int]] = {}  # by number; the index among them
        self.engine = EngineLoop(scheduler, self._take)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        adapter: str | None,
        client: str | None = None,
        salt: str | None = None,
    ) -> "Answers":
        """Let the engine answer prompts, `sampling.n` times each; all of them, or none.

        Raises:
            LoRAError: as `EngineLoop.submit`.
        """
        answers = Answers(self)
        try:
            for prompt in prompts:
                numbers = self.engine.submit(
                    prompt, sampling, adapter=adapter, client=client, salt=salt
                )
                for number in numbers:
                    self._answers[number] = answers, len(answers.running)
                    answers.running[number] = len(answers.running)
        except BaseException:
            answers.close()
            raise
        return answers

    def forget(self, number: int) -> None:
        """Let a request go; it gives nothing more."""
        if self._answers.pop(number, None) is not None:
            self.engine.cancel(number)

    def _take(self, answers: StepAnswers) -> None:
        self._loop.call_soon_threadsafe(self._deliver, answers)

    def _deliver(self, answers: StepAnswers) -> None:
        for number, event in (*answers.tokens.items(), *answers.failed.items()):
            found = self._answers.get(number)
            if found is None:
                continue
            waiting, index = found
            if isinstance(event, BaseException) or event.finish_reason is not None:
                del self._answers[number]
            waiting.put((index, event))


class Answers:
    """The answers to one HTTP request, as they come; a reader that is slow finds more at a time."""

    def __init__(self, bridge: EngineBridge) -> None:
        """Begin without requests."""
        self.running: dict[int, int] = {}  # index by number
        self._bridge = bridge
        self._events: list[Event] = []
        self._is_there = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add what has come."""
        self._events.append(event)
        self._is_there.set()

    async def take(self) -> list[Event]:
        """Wait for events, and return all that there are."""
        await self._is_there.wait()
        self._is_there.clear()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Cancel what has not ended: the client is gone, or has its answer."""
        for number in self.running:
            self._bridge.forget(number)
