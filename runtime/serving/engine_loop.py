"""EngineLoop: a thread that owns a scheduler, and gives requests of any thread their tokens."""

import logging
import threading
from collections import abc, deque
from time import monotonic
from typing import Self

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import LoRAError, StateError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.generation.token import StepAnswers
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.serving.step_garbage import StepGarbage
from trt_lora.runtime.store.entry import Lease

_LOGGER = logging.getLogger(__name__)
_MOST_ERRORS = 3  # steps in a row, after which the engine is taken for lost

OnEvents = abc.Callable[[StepAnswers], None]


class EngineLoop:
    """Runs the steps of a scheduler as long as there is something to do, and sleeps otherwise.

    It is woken by a request, by a cancel, and by an adapter that comes or is let go of. Every
    request that was submitted has one end: its last token or an error, unless it was cancelled.
    Tokens that were decoded leave before prompts are run, in one call for all requests.

    An error that belongs to no request, such as a failure of the device, ends those that run; the
    next step is tried. After three in a row the loop is dead: whoever waits ends with that error,
    and `submit` says so.
    """

    @checked
    def __init__(
        self,
        scheduler: Scheduler,
        on_events: OnEvents,
        *,
        on_step: abc.Callable[[float], None] | None = None,
        freezes_garbage: bool = True,
    ) -> None:
        """Start the thread.

        Args:
            scheduler: from now on the thread's alone.
            on_events: takes what a step gave, in the loop's thread: it had better be quick. What it
                raises is logged, and others go on; what it was given does not come again.
            on_step: is told behind each step how many seconds it took; as quick, and never raises.
            freezes_garbage: keep what is alive out of Python's garbage collections, which take
                longer than a step where many adapters are loaded, and collect what is new between
                steps and when idle instead; see `StepGarbage`. It holds for the whole process.
        """
        scheduler.prepare()
        self._scheduler, self._on_events, self._on_step = scheduler, on_events, on_step
        self._commands: deque[Sequence | int] = deque()  # a number is to be cancelled
        self._garbage = StepGarbage() if freezes_garbage else None
        self._is_collected = False
        self._errors: list[Exception] = []  # of the engine, since it last gave a token
        self._lock = threading.Lock()  # of what follows
        self._deadline: float | None = None  # of the drain, once it is closing
        self._error: BaseException | None = None  # that ended the loop
        self._thread = threading.Thread(target=self._run, name="trt-lora-engine")
        self._thread.start()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    @checked
    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        adapter: Lease | str | None = None,
        client: str | None = None,
        salt: str | None = None,
        on_requests: abc.Callable[[abc.Sequence[Sequence]], None] | None = None,
    ) -> tuple[int, ...]:
        """Submit `sampling.n` requests of one prompt from any thread; return their numbers.

        The prompt is encoded and checked in the caller's thread. Arguments are those of
        `Scheduler.submit`; `on_requests` is told the requests before any event of them can come.

        Raises:
            ConfigError, BackendError, UnknownAdapterError: as `Scheduler.submit`.
            StateError: the loop is closed or dead.
        """
        self._check_open()
        requests = self._scheduler.requests(
            prompt, sampling, adapter=adapter, client=client, salt=salt
        )
        with self._lock:
            self._check_open()
            if on_requests is not None:
                on_requests(requests)
            self._commands.extend(requests)
        self._scheduler.progress.set()
        return tuple(request.id for request in requests)

    @checked
    def cancel(self, request: int) -> None:
        """Let a request go from any thread, if it has not ended; no event of it comes afterwards.

        Events of the step that is just being made may still come.
        """
        self._commands.append(request)
        self._scheduler.progress.set()

    @checked
    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing more, and end the thread; any thread may call it, any number of times.

        Args:
            drain_s: seconds, most, in which requests may still end; the others end with an error.
        """
        with self._lock:
            if self._deadline is None:
                self._deadline = monotonic() + drain_s
        self._scheduler.progress.set()
        self._thread.join()

    @property
    def is_dead(self) -> bool:
        """Whether it has ended with an error, and takes nothing more."""
        return self._error is not None

    def _check_open(self) -> None:
        if self._error is not None:
            raise StateError(f"the engine's loop has died of: {self._error}") from self._error
        if self._deadline is not None:
            raise StateError("the engine's loop is closed; make another one")

    def _run(self) -> None:
        if self._garbage is not None:
            self._garbage.collect()
        try:
            while not self._is_over() and len(self._errors) < _MOST_ERRORS:
                self._follow_commands()
                if not self._scheduler or self._scheduler.is_stalled:
                    self._sleep()
                self._step()
            if len(self._errors) == _MOST_ERRORS:
                self._error = self._errors[-1]
        except BaseException as error:  # of our own: nobody shall wait for ever
            self._error = error
        finally:
            self._end()
            if self._garbage is not None:
                self._garbage.end()

    def _is_over(self) -> bool:
        """Whether it is closing, and nothing is left or the time to drain is over."""
        if self._deadline is None:
            return False
        return not (self._scheduler or self._commands) or monotonic() >= self._deadline

    def _follow_commands(self) -> None:
        """Submit and cancel what other threads have asked for, in their order."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                try:
                    self._scheduler.add(command)
                except LoRAError as error:  # its adapter was unloaded since
                    self._deliver(StepAnswers({}, {command.id: error}))
            elif command in self._scheduler:
                self._scheduler.cancel(command)

    def _sleep(self) -> None:
        """Wait for what another thread does; collect garbage once before."""
        if self._garbage is not None and not self._is_collected and not self._scheduler:
            self._garbage.collect()
            self._is_collected = True
        most = None if self._deadline is None else max(self._deadline - monotonic(), 0.0)
        if not self._commands:
            self._scheduler.sleep(most)

    def _step(self) -> None:
        """Make a step; note the error of the engine, if it has one."""
        if not self._scheduler:
            self._scheduler.progress.clear()
            return
        self._is_collected = False
        if self._garbage is not None:
            self._garbage.before_step()
        start = monotonic()
        try:
            self._deliver(self._scheduler.step(self._deliver))
        except Exception as error:
            self._errors.append(error)
            self._deliver(self._scheduler.fail_running(error))
        else:
            if self._on_step is not None:
                self._on_step(monotonic() - start)

    def _deliver(self, answers: StepAnswers) -> None:
        if not answers.tokens and not answers.failed:
            return
        if answers.tokens:
            self._errors.clear()
        try:
            self._on_events(answers)
        except Exception:
            _LOGGER.exception("the receiver of events failed; its events are lost")

    def _end(self) -> None:
        """End whatever has not ended."""
        with self._lock:
            if self._deadline is None:
                self._deadline = monotonic()  # dead: nothing more is taken
            commands = list(self._commands)
        error = self._error or StateError("the engine's loop was closed before the last token")
        left = [*self._scheduler.ids, *(c.id for c in commands if isinstance(c, Sequence))]
        try:
            self._scheduler.clear()
        finally:
            self._deliver(StepAnswers({}, dict.fromkeys(left, error)))
