"""Sequences that wait or run: in the admission policy and in rows, and in both at once."""

from collections import abc
from contextlib import contextmanager, suppress

from trt_lora.plugins.errors import LoRAError, StateError
from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.serving.admission import AdmissionPolicy
from trt_lora.runtime.store.store import AdapterStore


class ActiveSequences:
    """All requests of a scheduler by id, and the moves between waiting, running and the end.

    A move that is refused has changed nothing. One that is interrupted, in the few lines in which
    requests change places, cannot be mended: all requests are let go, and every later call raises a
    StateError that says so.
    """

    def __init__(self, policy: AdmissionPolicy, rows: Rows, adapters: AdapterStore) -> None:
        """Begin without requests."""
        self.policy, self.rows, self._adapters = policy, rows, adapters
        self.by_id: dict[int, Sequence] = {}
        self.failed: dict[int, BaseException] = {}  # why requests have ended without a last token
        self._is_moving = False

    def __getitem__(self, request: int) -> Sequence:
        """Return a request that waits or runs.

        Raises:
            StateError: it has ended, or there never was one.
        """
        if request not in self.by_id:
            raise StateError(f"request {request} neither waits nor runs: {list(self.by_id)}")
        return self.by_id[request]

    @property
    def running(self) -> list[Sequence]:
        """Those that have a row."""
        return self.rows.sequences

    def add(self, sequence: Sequence) -> None:
        """Let a request wait.

        Raises:
            UnknownAdapterError, StateError: as `AdmissionPolicy.submit`.
        """
        with self._changing_places():
            self.policy.submit(sequence)
            self.by_id[sequence.id] = sequence

    def add_all(self, sequences: abc.Iterable[Sequence]) -> None:
        """Let requests wait, all of them or none; errors are those of `add`."""
        added: list[Sequence] = []
        try:
            for sequence in sequences:
                self.add(sequence)
                added.append(sequence)
        except BaseException:
            self.check_whole()
            self.end(added)
            raise

    def schedule(self) -> bool:
        """Let requests join, and take rows whose adapter must leave its slot.

        Returns:
            Whether anything has changed.
        """
        with self._changing_places():
            step = self.policy.schedule(self.rows.cache.rows - len(self.rows.cache.owners))
            for sequence, error in step.failed:
                self.failed[sequence.id] = error
                self._release(sequence)
                del self.by_id[sequence.id]
            for sequence in step.preempted:
                self._preempt(sequence)
            for sequence in step.joined:
                self.rows.add(sequence)
                if sequence.cached_tokens is None:
                    sequence.cached_tokens = len(sequence.tokens) - len(sequence.pending)
                self.policy.charge(sequence, len(sequence.pending))
        return bool(step.failed or step.joined or step.preempted)

    def end(
        self,
        sequences: abc.Iterable[Sequence],
        error: BaseException | None = None,
        *,
        clear: bool = False,
    ) -> None:
        """Let requests go that wait or run.

        Args:
            sequences: the requests.
            error: why they end, where that is not their last token.
            clear: nothing of their rows may meet values of others.
        """
        with self._changing_places():
            for sequence in sequences:
                if error is not None:
                    self.failed[sequence.id] = error
                if sequence in self.rows.cache.owners:
                    self.rows.remove(sequence, clear=clear)
                self._release(sequence)
                self.policy.end(sequence)
                del self.by_id[sequence.id]

    def end_running(self) -> list[Sequence]:
        """Let all requests go that have a row, whatever a run has left there; return them."""
        with self._changing_places():
            running = self.running
            self.rows.clear()
            self.end(running)
        return running

    def preempt(self, sequence: Sequence) -> None:
        """Take the row from a request, which waits again."""
        with self._changing_places():
            self._preempt(sequence)

    def restart(self) -> None:
        """Begin every row again, behind what whole steps have given its sequence."""
        running = self.running
        self.rows.clear()
        for sequence in running:
            sequence.restart()
            self.rows.add(sequence)

    def check_whole(self) -> None:
        """Raise StateError if requests were changing places when an interrupt came."""
        if self._is_moving:
            self.let_go()  # the interrupt may have come before, or there were two
            raise StateError(
                "this scheduler was interrupted while requests changed places, and has let go of "
                "all of them; make another one, and submit what has not ended"
            )

    def let_go_if_torn(self) -> None:
        """Let all requests go, if they were changing places."""
        if self._is_moving:
            self.let_go()

    def let_go(self) -> None:
        """Give back every lease, whoever had it at the moment of the interrupt."""
        held = [s.lease for s in self.by_id.values() if s.lease is not None]
        try:
            self.rows.clear()
        finally:
            for lease in dict.fromkeys([*held, *self.policy.leases]):
                with suppress(StateError):  # it was given back, and no more
                    self._adapters.release(lease)
            self.by_id.clear()

    def check_integrity(self) -> None:
        """Raise StateError if requests, rows, leases and slots do not add up."""
        self.policy.check_integrity()
        self.rows.cache.check_integrity()
        running = {sequence.id for sequence in self.running}
        known = {sequence.id for sequence in self.policy.running}
        if running != known or not running <= self.by_id.keys():
            raise StateError(f"{running} have rows, and {known} run, of {list(self.by_id)}")

    def _preempt(self, sequence: Sequence) -> None:
        self.rows.remove(sequence)
        self.rows.counts.preempted += 1
        self.policy.preempt(sequence)
        sequence.leader = None
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        lease, sequence.lease = sequence.lease, None
        if lease is not None:
            self._adapters.release(lease)

    @contextmanager
    def _changing_places(self) -> abc.Iterator[None]:
        self._is_moving = True
        try:
            yield
        except LoRAError:
            self._is_moving = False
            raise
        except BaseException:
            self.let_go()
            raise
        self._is_moving = False
