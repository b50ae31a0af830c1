"""Responder: a thread that sends answers, so that the engine's never waits for Triton."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.scaleout.triton.answer import TritonAnswer, TritonReply
from trt_lora.runtime.server.engine_process.wire import WireError
from trt_lora.runtime.server.errors import HttpError, public

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.1  # between two looks for requests that nobody waits for


class Responder:
    """Owns the answers under way, by the numbers of their requests.

    Where steps come faster than Triton takes responses, one has the tokens of several: each takes a
    message to another process. To ask whether a client is gone is another, so that all are asked
    once in a tenth of a second; what they have asked for is let go of then.
    """

    def __init__(
        self,
        cancel: Callable[[int], None],
        told: Callable[[TritonAnswer, BaseException], BaseException],
        on_look: Callable[["Responder"], None],
    ) -> None:
        """Start the thread.

        Args:
            cancel: lets a request go, from any thread.
            told: the error that a client is told of.
            on_look: is told each time that the thread has looked at all of them.
        """
        self.answers: dict[int, TritonAnswer] = {}
        self.ended = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.prompt_tokens = self.tokens = 0
        self._cancel, self._told, self._on_look = cancel, told, on_look
        self._steps = SimpleQueue[StepAnswers | None]()
        self._thread = Thread(target=self._run, name="trt-lora-answers")
        self._thread.start()

    def put(self, step: StepAnswers) -> None:
        """Take what a step has given; the engine's thread calls it."""
        self._steps.put(step)

    def close(self) -> None:
        """Send what is left, and end."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        looked, is_open = monotonic(), True
        while is_open:
            is_open = self._send_what_has_come()
            if monotonic() - looked >= _LOOK_S:
                self._look()
                looked = monotonic()

    def _send_what_has_come(self) -> bool:
        """Wait for a step, and send all that have come by then; return whether more may come."""
        begun: dict[int, TritonAnswer] = {}
        with suppress(Empty):
            step = self._steps.get(timeout=_LOOK_S)
            while step is not None:
                for number, token in step.tokens.items():
                    if (answer := self.answers.get(number)) is not None:
                        self._count(answer, token)
                        begun[number] = answer
                self._fail(step)
                step = self._steps.get_nowait()
            self._respond(begun)
            return False
        self._respond(begun)
        return True

    def _count(self, answer: TritonAnswer, token: Token) -> None:
        self.tokens += 1
        self.prompt_tokens += 0 if answer.is_begun else answer.prompt_tokens
        answer.take(token)

    def _fail(self, step: StepAnswers) -> None:
        for number, error in step.failed.items():
            if (answer := self.answers.pop(number, None)) is not None:
                self.ended["error"] += 1
                fail(answer.reply, self._told(answer, error))

    def _respond(self, answers: Mapping[int, TritonAnswer]) -> None:
        for number, answer in answers.items():
            if number not in self.answers:  # it has failed since
                continue
            if answer.finish_reason is not None:
                self.ended[answer.finish_reason] += 1
                del self.answers[number]
            try:
                answer.respond()
            except Exception:  # Triton's: the other answers go on
                _LOG.exception("a response could not be sent")
                self._give_up(number, answer)

    def _give_up(self, number: int, answer: TritonAnswer) -> None:
        self._cancel(number)
        self.answers.pop(number, None)
        with suppress(Exception):
            answer.reply.fail("a response could not be sent")

    def _look(self) -> None:
        for number, answer in list(self.answers.items()):
            if answer.reply.is_cancelled():
                self._let_go(number)
        self._on_look(self)

    def _let_go(self, number: int) -> None:
        self._cancel(number)
        self.ended["abort"] += 1
        self.answers.pop(number).reply.end()


def fail(reply: TritonReply, error: BaseException) -> None:
    """End a request with an error, which says nothing of this machine's files."""
    if isinstance(error, LoRAError | HttpError):
        reply.fail(public(str(error)))
    else:
        _LOG.error("the engine failed", exc_info=error)
        reply.fail(WireError.of(error).message)
