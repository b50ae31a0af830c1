"""EngineSide: the engine's half of a server: it obeys commands, and tells of every step."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.engine import Engine, open_engine
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.server.engine_process import wire
from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk
from trt_lora.runtime.server.engine_process.step_meter import StepMeter
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.store.config import StoreConfig

_LOG = logging.getLogger(__name__)
# Threads: who asks for an adapter does not wait behind those whose grammars are compiled.
_AT_DESK, _SUBMITTING = 16, 4
# Niceness of those that read adapters, where each thread has its own. On two cores of a CPU gaps
# between tokens were 2.4 times as long beside loads without a pause, at their 99th percentile, and
# are 1.2 times as long; a load took 0.03 s there, and takes 0.13 s.
_GIVING_WAY = 10


def serve_engine(connection: socket.socket) -> None:
    """Open an engine and run it, as the other end of a socket commands, until that is closed."""
    channel = wire.EngineChannel(connection)
    try:
        commands = channel.commands()
        opening = next(commands, None)
        if isinstance(opening, wire.Open):
            with _reported(channel, 0):
                _run(opening, commands, channel)
    finally:
        channel.close()


def _run(opening: wire.Open, commands: Iterator[wire.Command], channel: wire.EngineChannel) -> None:
    store = StoreConfig(**opening.store)
    with open_engine(opening.directory, opening.backend, adapters=store) as engine:
        side = EngineSide(engine, ServingConfig(**opening.serving), channel)
        channel.send(wire.Answer(0, side.rows))
        try:
            for command in commands:
                if isinstance(command, wire.Close):
                    break
                side.obey(command)
        finally:
            side.close()


class EngineSide:
    """Submits to an `EngineLoop`, and lets slow commands run in threads beside it."""

    def __init__(self, engine: Engine, config: ServingConfig, channel: wire.EngineChannel) -> None:
        """Start the engine's loop."""
        self._channel, self._desk = channel, AdapterDesk(engine.adapters)
        self._scheduler = engine.serve(config)
        self.rows = config.rows or engine.manifest.max_batch_size
        self._meter = StepMeter(self._scheduler.counts)
        self._loop = EngineLoop(self._scheduler, self._deliver, on_step=self._meter.step)
        self._steps: Mapping[str, Callable[[], Any]] = {
            "steps": self._meter.values,
            "restart": self._meter.restart,
        }
        self._desk_threads = ThreadPoolExecutor(_AT_DESK, "trt-lora-desk", _give_way)
        self._submit_threads = ThreadPoolExecutor(_SUBMITTING, "trt-lora-submit")

    def obey(self, command: wire.Command) -> None:
        """Carry out a command; one that reads files or compiles a grammar in another thread."""
        if isinstance(command, wire.Ask):
            self._desk_threads.submit(self._ask, command)
        elif isinstance(command, wire.Cancel):
            self._cancel(command.numbers)
        elif isinstance(command, wire.Submit):
            if "structured_outputs" in command.sampling or command.blend:
                self._submit_threads.submit(self._submit, command)
            else:
                self._submit(command)

    def close(self) -> None:
        """End the engine's loop; what has not ended is told so."""
        self._loop.close()
        for threads in (self._desk_threads, self._submit_threads):
            threads.shutdown(cancel_futures=True)

    def _submit(self, command: wire.Submit) -> None:
        numbers: list[int] = []

        def accepted(requests: Sequence[Request]) -> None:
            self._meter.add(requests)
            found = tuple(request.id for request in requests)
            numbers.extend(found)
            self._channel.send(wire.Accepted(command.call, found))

        with _reported(self._channel, command.call):
            try:
                adapter = self._desk.blended(command.blend) if command.blend else command.adapter
                for prompt, most in zip(command.prompts, command.max_tokens, strict=True):
                    self._loop.submit(
                        prompt,
                        _sampling(command.sampling, most),
                        adapter=adapter,
                        client=command.client,
                        salt=command.salt,
                        on_requests=accepted,
                    )
            except BaseException:
                self._cancel(numbers)
                raise
            self._channel.send(wire.Answer(command.call))

    def _ask(self, command: wire.Ask) -> None:
        with _reported(self._channel, command.call):
            asked = self._steps.get(command.what)
            value = asked() if asked else self._desk.answer(command.what, command.options)
            self._channel.send(wire.Answer(command.call, value))

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._meter.drop(number)
            self._loop.cancel(number)

    def _deliver(self, answers: StepAnswers) -> None:
        failed = {number: wire.WireError.of(error) for number, error in answers.failed.items()}
        running = self._scheduler.running
        waiting = len(self._scheduler) - running
        times = self._meter.times(answers)
        tokens = list(answers.tokens.values())
        self._channel.send(wire.Step(tokens, failed, running, waiting, times))


def _give_way() -> None:
    """Let the steps of the engine have the processor before this thread."""
    if sys.platform == "linux":
        os.nice(_GIVING_WAY)


def _sampling(given: dict[str, object], max_tokens: int) -> SamplingParams:
    fields = {**given, "max_tokens": max_tokens}
    if isinstance(wanted := fields.get("structured_outputs"), dict):
        fields["structured_outputs"] = StructuredOutputsParams(**wanted)
    return SamplingParams(**fields)  # type: ignore[arg-type] # it checks each


@contextmanager
def _reported(channel: wire.EngineChannel, call: int) -> Iterator[None]:
    """Send an error to whoever called; one that is no fault of the input is logged too."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, LoRAError):
            _LOG.exception("a command failed")
        channel.send(wire.Failed(call, wire.WireError.of(error)))
