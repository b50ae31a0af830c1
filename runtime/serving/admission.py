"""AdmissionPolicy: which of the waiting requests are given a row at a step."""

from collections import Counter, abc
from dataclasses import dataclass, field
from time import monotonic

from trt_lora.plugins.errors import LoRAError, StateError
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.serving.adapter_loads import AdapterLoads, AdapterStage
from trt_lora.runtime.serving.drained import DrainedAdapters
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.serving.slot_scan import SlotScan
from trt_lora.runtime.serving.waiting import WaitingSequences
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore


@dataclass
class ScheduledStep:
    """Who joins at a step, whose row is taken, and who will never join."""

    rows: int  # that are left
    resident: abc.Set[str]  # the adapters that could be bound at once when the step began
    joined: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, BaseException]] = field(default_factory=list)


class AdmissionPolicy:
    """Requests that wait, by client and adapter, and those that run.

    Clients share: whose requests have received least, in tokens of prompts and answers, comes
    first, and of one client the oldest. A client that comes begins with what the least served of
    those who are there has received, so that nobody saves up. At every step

    1. requests of the base model and of adapters that are resident join while rows are free;
    2. adapters without a slot are looked at, in the order of their first requests: a slot that is
       free is held for one while it is copied there, and the next ones are read from disk;
    3. where an adapter has found no slot and its first request has waited `max_wait_steps` or
       `max_wait_s`, a running adapter is *drained*: nothing younger than that request joins of it
       any more, so that its slot comes free. It is the one whose answers end first. At most half of
       the running adapters are drained at a time, or one. After `preempt_after` steps of that, its
       rows are preempted; they go on when their turn comes again.

    Who finds no slot is passed over, and holds up nobody. No step waits for a load: adapters are
    read and copied in the background, and their requests join when they are there. Who can never
    have a slot, because others are pinned in all of them, fails at once.

    **Bounds.** Let a request be the first of its adapter, with a row free and all slots held by
    requests. After `max_wait_steps` or `max_wait_s`, or when its adapter is on the host where that
    is later, an adapter is drained for it, and at most `preempt_after` steps later its slot is
    free; the request joins when its adapter is copied, a step later or more. Of more adapters than
    are drained at a time, each round takes as long again. And let the requests of a client need no
    slot: its next one is given the next row that comes free, or the one after it, however many
    requests another client has submitted.

    `schedule` is called once for each step. Not for several threads at a time.
    """

    def __init__(
        self,
        adapters: AdapterStore,
        config: ServingConfig | None = None,
        *,
        clock: abc.Callable[[], float] = monotonic,
    ) -> None:
        """Take the adapters; nobody waits. `clock` returns seconds."""
        self._adapters, self._config, self._clock = adapters, config or ServingConfig(), clock
        self._loads = AdapterLoads(adapters)
        self._waiting = WaitingSequences()
        # Those that have a row, and at which step their answers end, their prompts left out.
        self._running: dict[Sequence, int] = {}
        self._in_use = Counter[str]()  # how many run of each adapter
        self._service: dict[abc.Hashable, float] = {}  # tokens that each client has received
        self._drained = DrainedAdapters()
        self._scan = SlotScan(0, 0.0, self._config, rows=0, most_late=0)  # the last one
        self.steps = 0  # begun so far

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> abc.Collection[Sequence]:
        """Those that have a row."""
        return self._running.keys()

    def seconds_left(self) -> float:
        """Return after how many seconds a request has waited too long, at most `max_wait_s`."""
        return min(max(self._scan.next_time - self._clock(), 0.0), self._config.max_wait_s)

    @property
    def leases(self) -> list[Lease]:
        """What is held for requests, or was a moment ago: for who has to give all of it back."""
        return [s.lease for s in self.running if s.lease is not None] + self._loads.leases

    def submit(self, sequence: Sequence) -> None:
        """Take a request.

        Raises:
            UnknownAdapterError: there is no such adapter.
            StateError: it can never have a slot: others are pinned in all.
        """
        if sequence.adapter is not None and sequence.lease is None:
            self._adapters.info(sequence.adapter)
            if error := self._pinned_error(sequence.adapter):
                raise error
        active = self._waiting.clients | {running.client for running in self.running}
        if sequence.client not in active:
            least = min((self._service[client] for client in active), default=0.0)
            self._service = {client: self._service[client] for client in active}
            self._service[sequence.client] = least
        sequence.arrival, sequence.arrived_at = self.steps, self._clock()
        self._wait(sequence)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of its prompt or answer as received by the request's client."""
        self._service[sequence.client] += tokens

    def schedule(self, free_rows: int) -> ScheduledStep:
        """Begin a step: return who joins, whose row is to be taken, and who never joins.

        Args:
            free_rows: how many may join.

        Returns:
            Those who join have leases, which belong to their rows from now on. Those whose rows
            are to be taken still run, until `preempt`.
        """
        self.steps += 1
        step = ScheduledStep(free_rows, self._adapters.bindings.resident)
        names = self._drained.preempt(self.steps, self._config.preempt_after)
        step.preempted = [s for s in self.running if s.adapter in names]
        self._end_loads(step)
        self._admit_resident(step)
        is_due = self.steps >= self._scan.next_step or self._clock() >= self._scan.next_time
        if self._waiting and (is_due or (step.rows and not self._scan.is_full)):
            self._scan_slots(step)
        return step

    def end(self, sequence: Sequence) -> None:
        """Let a request go that waits or runs; whoever has its row has released its lease.

        Raises:
            StateError: it does neither.
        """
        if sequence in self._waiting:
            self._leave(sequence)
            self._scan_again()
        else:
            self._stop(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Let a request that runs wait again, in its place by age; it has no row any more.

        Where it has answered, the version of the adapter that it did so with has to go on: if it
        is replaced or unloaded meanwhile, the request fails.

        Raises:
            StateError: it does not run.
        """
        self._stop(sequence)
        if sequence.lease is not None and sequence.answer:
            sequence.version = sequence.lease.version
        self._wait(sequence)

    def check_integrity(self) -> None:
        """Raise StateError if a request is in two places, or an adapter is held for nobody."""
        self._waiting.check_integrity()
        both = [s.id for s in self.running if s in self._waiting]
        idle = [name for name in self._loads.reserved if not self._waiting.wants(name)]
        bare = [s.id for s in self.running if s.adapter is not None and s.lease is None]
        names = Counter(s.adapter for s in self.running if s.adapter is not None)
        if both or idle or bare or names != self._in_use:
            raise StateError(
                f"requests {both} wait and run, slots are held for {idle}, whom nobody wants, "
                f"{bare} have no lease, and {dict(names)} run, counted {dict(self._in_use)}"
            )
        self._adapters.check_integrity()

    def _end_loads(self, step: ScheduledStep) -> None:
        """Fail the requests whose adapter could not be read, and those alone."""
        if not self._loads.have_ended():
            return
        ended, failed = self._loads.end()
        for name in ended:
            for sequence in self._waiting.of(name):
                sequence.ready_at = self._clock()
        if not self._in_use and not self._loads.reserved:
            failed |= self._loads.give_up()
        for name, error in failed.items():
            self._fail(name, error, step)
        self._scan_again()

    def _admit_resident(self, step: ScheduledStep) -> None:
        """Step 1 of the class: of each queue as many as there are rows, in turns."""
        passed = set[tuple[abc.Hashable, str | None]]()
        while step.rows:
            heads = self._waiting.heads(self._service)
            head = next((h for h in heads if (h.client, h.adapter) not in passed), None)
            if head is None:
                return
            is_ready = head.adapter is None or head.lease or head.adapter in step.resident
            if not is_ready or not self._drained.admits(head) or not self._try(head, step):
                passed.add((head.client, head.adapter))

    def _try(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """Let a request join whose adapter may be ready; return whether it waits no more."""
        if sequence.adapter is None or sequence.lease is not None:
            return self._join(sequence, step)
        stage = self._advance(sequence.adapter, step)
        return stage is None or (stage is AdapterStage.READY and self._join(sequence, step))

    def _scan_slots(self, step: ScheduledStep) -> None:
        """Steps 2 and 3 of the class."""
        most_late = max(len(self._in_use) // 2, 1)
        scan = SlotScan(self.steps, self._clock(), self._config, step.rows, most_late)
        for name, sequence in self._without_slot(step):
            is_late = scan.is_late(sequence)
            if not scan.should_continue(is_late=is_late):
                break
            if scan.is_full and name in self._scan.refused:  # as at the last pass
                stage: AdapterStage | None = AdapterStage.NO_SLOT
            else:
                reserve = is_late or scan.rows > 0
                stage = self._advance(name, step, read=scan.may_read, reserve=reserve)
            if stage is AdapterStage.NO_SLOT and (error := self._pinned_error(name)):
                self._fail(name, error, step)
                stage = None
            scan.record(sequence, name, stage, is_late=is_late)
            scan.rows -= name in self._loads.reserved
        self._scan = scan
        self._drained.assign(scan.late, self._in_use.keys(), self._last_steps, self.steps)
        if len(self._drained) < len(scan.late):  # the next one that begins can be
            self._scan_again()

    def _without_slot(self, step: ScheduledStep) -> abc.Iterator[tuple[str, Sequence]]:
        """The first request of each adapter that has no slot, in the order of their turns."""
        seen = set[str]()
        for head in self._waiting.heads(self._service):
            name = head.adapter
            if name is None or name in seen or head.lease is not None:
                continue
            seen.add(name)
            is_used = name in self._in_use or name in self._loads.reserved
            if not (name in step.resident and is_used):
                yield name, head

    def _last_steps(self) -> dict[str, int]:
        """The step at which the last answer of each adapter ends."""
        last: dict[str, int] = {}
        for sequence, end in self._running.items():
            if (name := sequence.adapter) is not None:
                last[name] = max(last.get(name, 0), end)
        return last

    def _scan_again(self) -> None:
        self._scan.next_step = self.steps

    def _advance(
        self, name: str, step: ScheduledStep, *, read: bool = False, reserve: bool = False
    ) -> AdapterStage | None:
        """Bring an adapter nearer, or see where it is; None: those who wait for it have failed."""
        try:
            return self._loads.advance(name, step.resident, read=read, reserve=reserve)
        except LoRAError as error:  # unloaded since it was submitted
            self._fail(name, error, step)
            return None

    def _join(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """Give a request a row; return whether it waits no more: it has one, or has failed."""
        if sequence.adapter is not None and sequence.lease is None:
            try:
                sequence.lease = self._loads.take(sequence.adapter, sequence.version)
            except LoRAError as error:
                step.failed.append((sequence, error))
                self._leave(sequence)
                return True
            if sequence.lease is None:
                return False
        self._leave(sequence)
        self._running[sequence] = self.steps + sequence.left
        sequence.joined_at = sequence.joined_at or self._clock()
        if sequence.lease is not None:
            sequence.answered_by = sequence.lease.version
        if sequence.adapter is not None:
            self._in_use[sequence.adapter] += 1
        step.joined.append(sequence)
        step.rows -= 1
        return True

    def _pinned_error(self, name: str) -> StateError | None:
        """Why an adapter can never have a slot, if it cannot."""
        slots, pinned = self._adapters.bindings.slot_count, self._adapters.pinned
        if slots is None or name in pinned or len(pinned) < slots:
            return None
        return StateError(
            f"adapter {name!r} can have no slot: {', '.join(map(repr, sorted(pinned)))} are pinned "
            f"in all {slots}; unpin one, or build with a larger --max-loras"
        )

    def _fail(self, name: str, error: BaseException, step: ScheduledStep) -> None:
        """End all requests that wait for an adapter and have no lease of their own."""
        for sequence in self._waiting.of(name):
            if sequence.lease is None:
                step.failed.append((sequence, error))
                self._waiting.remove(sequence)
        self._loads.forget(name)

    def _wait(self, sequence: Sequence) -> None:
        is_new = not self._waiting.wants(sequence.adapter)
        self._waiting.add(sequence)
        if is_new or sequence is self._waiting.of(sequence.adapter)[0]:
            self._scan_again()

    def _leave(self, sequence: Sequence) -> None:
        """Take a request out of its queue, and give back the slot that was held for its adapter."""
        self._waiting.remove(sequence)
        if sequence.adapter is not None and not self._waiting.wants(sequence.adapter):
            self._loads.forget(sequence.adapter)

    def _stop(self, sequence: Sequence) -> None:
        if self._running.pop(sequence, None) is None:
            running = [other.id for other in self.running]
            raise StateError(f"request {sequence.id} does not run; those are {running}")
        if (name := sequence.adapter) is not None:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]
                self._loads.make_room()
                self._scan_again()
