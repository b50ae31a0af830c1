"""LoRABatcher: which of the waiting requests join the batch at a step."""

from collections.abc import Iterator, Sequence
from typing import Generic

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import LoRAError, StateError
from trt_lora.runtime.serving.adapter_cache import AdapterCache, LeaseT
from trt_lora.runtime.serving.adapter_loads import AdapterLoads, AdapterStage
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.choice import Choice
from trt_lora.runtime.serving.drained import DrainedAdapters
from trt_lora.runtime.serving.look import Look
from trt_lora.runtime.serving.request import Request
from trt_lora.runtime.serving.running import Running, RunningRequests
from trt_lora.runtime.serving.waiting import WaitingRequests


class LoRABatcher(Generic[LeaseT]):
    """Requests that wait, by adapter, and those that run.

    At every step

    1. requests of the base model and of adapters that lie in slots join while rows are free, the
       oldest first;
    2. adapters without a slot are looked at, in the order of their oldest requests: a slot that is
       free is held for one while it is copied there, and the next ones are read from disk;
    3. where an adapter has found no slot and its oldest request has waited `drain_after` steps, a
       running adapter is *drained*: nothing younger than that request joins of it any more, so that
       its slot comes free. It is the one whose answers end first. At most half of the running
       adapters are drained at a time, or one.

    Who finds no slot is passed over, and holds up nobody. No step waits for a load: adapters are
    read and copied in the background, and their requests join when they are there.

    **Bound.** Let a request be the oldest of its adapter, with a row free and all slots held by
    requests. After `drain_after` steps, or when its adapter is on the host where that is later, an
    adapter is drained for it. The slot is free, at the latest, after the longest answer that is
    under way then, steps of its prompt included; the request joins when its adapter is copied, one
    step later or more. Of more adapters than are drained at a time, each round takes as long again.
    Older requests go first, those among them that were preempted. What is pinned is not drained.

    Time is counted in steps: `choose` is called once for each. Not for several threads at a time.
    """

    @checked
    def __init__(self, adapters: AdapterCache[LeaseT], config: BatcherConfig | None = None) -> None:
        """Take the adapters; nobody waits."""
        self._adapters, self._config = adapters, config or BatcherConfig()
        self._loads = AdapterLoads(adapters)
        self._waiting = WaitingRequests()
        self._running = RunningRequests[LeaseT]()
        self._drained = DrainedAdapters()
        self._look = Look(0, self._config, rows=0, most_late=0)  # the last one
        self.steps = 0  # begun so far

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests have a row."""
        return len(self._running)

    @property
    def leases(self) -> list[LeaseT]:
        """What requests hold, or held a moment ago: for whoever has to give all of it back."""
        return [*self._running.leases, *self._loads.leases]

    @checked
    def has(self, request_id: object) -> bool:
        """Whether a request waits or runs."""
        return request_id in self._waiting or request_id in self._running

    @checked
    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        if request.adapter is not None:
            self._adapters.generation(request.adapter)
        self._wait(request)

    @checked
    def choose(self, free_rows: int) -> Choice[LeaseT]:
        """Begin a step: return who joins, and who never will.

        Args:
            free_rows: how many may join.

        Returns:
            Those who join, with leases that belong to their rows from now on.
        """
        self.steps += 1
        choice: Choice[LeaseT] = Choice(free_rows, self._adapters.slots)
        self._end_loads(choice)
        self._admit_resident(choice)
        if self.steps >= self._look.next_step or (choice.rows and not self._look.is_full):
            self._look_for_slots(choice)
        return choice

    @checked
    def end(self, request_id: int) -> None:
        """Let a request go that waits or runs; whoever has its row has released its lease.

        Raises:
            StateError: it does neither.
        """
        request = self._waiting.get(request_id)
        if request is None:
            self._stop(request_id)
        else:
            self._leave(request)
            self._look_again()

    @checked
    def preempt(self, request_id: int, tokens: Sequence[int]) -> None:
        """Let a request that runs wait again, in its place by age; it has no row any more.

        Args:
            request_id: its number.
            tokens: that it was given since it joined. The generation of the adapter that gave them
                has to go on: if it is replaced or unloaded meanwhile, the request fails.

        Raises:
            StateError: it does not run.
        """
        stopped = self._stop(request_id)
        generation = None if stopped.lease is None else stopped.lease.generation
        self._wait(stopped.request.behind(tokens, generation))

    def check_integrity(self) -> None:
        """Raise StateError if a request is in two places, or an adapter is held for nobody."""
        self._waiting.check_integrity()
        self._running.check_integrity()
        both = [number for number in self._running if self._waiting.get(number) is not None]
        idle = [name for name in self._loads.reserved if self._waiting.head(name) is None]
        if both or idle:
            raise StateError(
                f"requests {both} wait and run, and slots are held for {idle}, whom nobody wants"
            )
        self._adapters.check_integrity()

    def _end_loads(self, choice: Choice[LeaseT]) -> None:
        """Fail the requests whose adapter could not be read, and those alone."""
        if not self._loads.have_ended():
            return
        failed = self._loads.end()
        if not self._running.adapters and not self._loads.reserved:
            failed |= self._loads.give_up()
        for name, error in failed.items():
            self._fail(name, error, choice)
        self._look_again()

    def _admit_resident(self, choice: Choice[LeaseT]) -> None:
        """Step 1 of the class."""
        heads, place = self._waiting.heads, 0
        while choice.rows and place < len(heads):
            head = heads[place]
            is_ready = head.adapter is None or head.adapter in choice.resident
            if not is_ready or not self._drained.admits(head) or not self._try(head, choice):
                place += 1

    def _try(self, request: Request, choice: Choice[LeaseT]) -> bool:
        """Let a request join whose adapter may be ready; return whether it waits no more."""
        stage = self._advance(request.adapter, choice)
        return stage is None or (stage is AdapterStage.READY and self._join(request, choice))

    def _look_for_slots(self, choice: Choice[LeaseT]) -> None:
        """Steps 2 and 3 of the class."""
        most_late = max(len(self._running.adapters) // 2, 1)
        look = Look(self.steps, self._config, choice.rows, most_late)
        for name, request in self._without_slot(choice):
            is_late = look.is_late(request)
            if not look.goes_on(is_late=is_late):
                break
            if look.is_full and name in self._look.refused:  # as at the last look
                stage: AdapterStage | None = AdapterStage.NO_SLOT
            else:
                reserve = is_late or look.rows > 0
                stage = self._advance(name, choice, read=look.may_read, reserve=reserve)
            look.note(request, name, stage, is_late=is_late)
            look.rows -= name in self._loads.reserved
        self._look = look
        self._drain(look)

    def _without_slot(self, choice: Choice[LeaseT]) -> Iterator[tuple[str, Request]]:
        """The oldest request of each adapter that has no slot, the oldest first."""
        resident, running, reserved = choice.resident, self._running.adapters, self._loads.reserved
        for head in tuple(self._waiting.heads):
            name = head.adapter
            if name is None or (name in resident and (name in running or name in reserved)):
                continue
            yield name, head

    def _drain(self, look: Look) -> None:
        self._drained.assign(look.late, self._running.adapters, self._running.ends)
        if len(self._drained) < len(look.late):  # the next one that begins can be
            self._look_again()

    def _look_again(self) -> None:
        self._look.next_step = self.steps

    def _advance(
        self, name: str | None, choice: Choice[LeaseT], *, read: bool = False, reserve: bool = False
    ) -> AdapterStage | None:
        """Bring an adapter nearer, or see where it is; None: those who wait for it have failed."""
        if name is None:
            return AdapterStage.READY
        try:
            return self._loads.advance(name, choice.resident, read=read, reserve=reserve)
        except LoRAError as error:  # unloaded since it was submitted
            self._fail(name, error, choice)
            return None

    def _join(self, request: Request, choice: Choice[LeaseT]) -> bool:
        """Give a request a row; return whether it waits no more: it has one, or has failed."""
        lease = None
        if request.adapter is not None:
            try:
                lease = self._loads.take(request.adapter, request.generation)
            except LoRAError as error:
                choice.failed[request.id] = error
                self._leave(request)
                return True
            if lease is None:
                return False
        self._leave(request)
        running = Running(request, lease, self.steps + request.most_tokens)
        self._running.add(running)
        choice.joined.append(running)
        choice.rows -= 1
        return True

    def _fail(self, name: str, error: BaseException, choice: Choice[LeaseT]) -> None:
        """End all requests that wait for an adapter."""
        for request in self._waiting.of(name):
            choice.failed[request.id] = error
            self._waiting.remove(request)
        self._loads.forget(name)

    def _wait(self, request: Request) -> None:
        self._waiting.add(request)
        if self._waiting.head(request.adapter) is request:
            self._look_again()

    def _leave(self, request: Request) -> None:
        """Take a request out of its queue, and give back the slot that was held for its adapter."""
        self._waiting.remove(request)
        if request.adapter is not None and self._waiting.head(request.adapter) is None:
            self._loads.forget(request.adapter)

    def _stop(self, request_id: int) -> Running[LeaseT]:
        stopped = self._running.stop(request_id)
        name = stopped.request.adapter
        if name is not None and name not in self._running.adapters:
            self._loads.make_room()
            self._look_again()
        return stopped
