"""LoRABatcher: which of the waiting requests join the batch at a step."""

import heapq
from collections.abc import Sequence
from typing import Generic

from trt_lora.plugins.errors import LoRAError, StateError, UnknownAdapterError
from trt_lora.runtime.serving.adapter_cache import AdapterCache, LeaseT
from trt_lora.runtime.serving.adapter_loads import AdapterLoads, Stage
from trt_lora.runtime.serving.batcher_config import BatcherConfig
from trt_lora.runtime.serving.choice import Choice
from trt_lora.runtime.serving.drained import DrainedAdapters
from trt_lora.runtime.serving.request import Request
from trt_lora.runtime.serving.running import Running, RunningRequests
from trt_lora.runtime.serving.waiting import WaitingRequests


class LoRABatcher(Generic[LeaseT]):
    """Requests that wait, by adapter, and the leases of those that run.

    At every step, as many requests as rows are free join, in this order:

    1. Those that were passed over at `drain_after` steps, the oldest first. For each adapter among
       them that finds no slot, a running adapter is *drained*: of that one nothing younger joins
       any more, so that its slot comes free. It is the one whose answers end first.
    2. Those of the base model, and of adapters that lie in slots, the oldest first.
    3. Others, the oldest first: a slot is held for them while their adapter is copied there.

    Who finds no slot is passed over, and holds up nobody. No step waits for a load: adapters are
    read and copied in the background, and their requests join when they are there.

    **Bound.** Let a request be the oldest of its adapter, with a row free and all slots held by
    requests. After `drain_after` steps, or when its adapter is on the host where that is later, an
    adapter is drained for it. The slot is free, at the latest, after the longest answer that is
    under way then, steps of its prompt included; the request joins when its adapter is copied. Of
    more adapters than slots that wait like this, each round of as many takes one longest answer.
    Older requests go first, those among them that were preempted. What is pinned is not drained.

    Time is counted in steps: `choose` is called once for each. Not for several threads at a time.
    """

    def __init__(self, adapters: AdapterCache[LeaseT], config: BatcherConfig | None = None) -> None:
        """Take the adapters; nobody waits."""
        self._adapters, self._config = adapters, config or BatcherConfig()
        self._loads = AdapterLoads(adapters)
        self._waiting = WaitingRequests()
        self._running = RunningRequests[LeaseT]()
        self._drained = DrainedAdapters()
        self.steps = 0  # begun so far

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests have a row."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        if request.adapter is not None:
            self._adapters.generation(request.adapter)
        self._waiting.add(request)

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
        younger = self._admit_overdue(choice)
        self._admit_resident(choice)
        self._prepare(younger, choice)
        return choice

    def end(self, request_id: int) -> None:
        """Let a request go that waits or runs; whoever has its row has released its lease.

        Raises:
            StateError: it does neither.
        """
        request = self._waiting.get(request_id)
        if request is None:
            self._stop(request_id)
            self._drained.retain(self._running.adapters)
        else:
            self._leave(request)

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
        self._waiting.add(stopped.request.behind(tokens, generation))

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
        failed = self._loads.end()
        if not self._running and not self._loads.reserved:
            failed |= self._loads.give_up()
        for name, error in failed.items():
            self._fail(name, error, choice)

    def _admit_overdue(self, choice: Choice[LeaseT]) -> Sequence[Request]:
        """Step 1 of the class; return the heads of the queues behind those that were looked at."""
        heads, place, without_slot = self._waiting.heads, 0, 0
        latest = self.steps - self._config.drain_after
        while place < len(heads) and heads[place].arrival < latest:
            if choice.looked_at >= self._config.look_ahead:
                break
            if self._drained.is_among(heads[place].adapter, without_slot):
                place += 1
                continue
            stage = self._try(heads[place], choice, reserve=True)
            place += stage is not None
            if stage is not None and stage.wants_room:
                without_slot += 1
                if not self._drain(without_slot):
                    break
        self._drained.retain(self._running.adapters)
        self._drained.shorten(without_slot)
        return heads[place : place + self._config.look_ahead]

    def _drain(self, count: int) -> bool:
        """Drain adapters until there are so many; return whether there are.

        Half of those that run go on: each that takes a slot has time to fill rows. One that has
        begun at this step takes in all of its requests first.
        """
        if count > max(len(self._running.adapters) // 2, 1):
            return False
        if count > len(self._drained):
            ends = self._running.ends(before=self.steps)
            others = [name for name in ends if name not in self._drained]
            if others:
                self._drained.add(min(others, key=ends.__getitem__))
        return count <= len(self._drained)

    def _admit_resident(self, choice: Choice[LeaseT]) -> None:
        """Step 2 of the class."""
        if not choice.rows:
            return
        names = [name for name in (None, *choice.resident) if name not in self._drained]
        found = [head for name in names if (head := self._waiting.head(name))]
        ready = [(head.id, head) for head in found]
        heapq.heapify(ready)
        while choice.rows and ready:
            _, request = heapq.heappop(ready)
            left = self._try(request, choice, reserve=False) is None
            if left and (head := self._waiting.head(request.adapter)):
                heapq.heappush(ready, (head.id, head))

    def _prepare(self, heads: Sequence[Request], choice: Choice[LeaseT]) -> None:
        """Step 3 of the class: no more slots are held than rows are free; reading goes ahead."""
        config, rows = self._config, choice.rows
        for request in heads:
            if choice.looked_at >= (config.look_ahead if rows else config.load_ahead):
                return
            if request.adapter is None or request.adapter in choice.resident:
                continue
            stage = self._try(request, choice, reserve=rows > 0)
            if stage is not None and stage.wants_room:
                rows = 0  # nor is there for those behind
            elif request.adapter in self._loads.reserved:
                rows -= 1

    def _try(self, request: Request, choice: Choice[LeaseT], *, reserve: bool) -> Stage | None:
        """Let a request join, or bring its adapter nearer; None: it does not wait any more."""
        if request.adapter is None:
            return self._join(request, choice) if choice.rows else Stage.READY
        name = request.adapter
        choice.looked_at += name not in choice.resident
        reads = choice.looked_at <= self._config.load_ahead
        try:
            stage = self._loads.advance(name, choice.resident, read=reads, reserve=reserve)
        except UnknownAdapterError as error:  # unloaded since it was submitted
            self._fail(name, error, choice)
            return None
        return self._join(request, choice) if stage is Stage.READY and choice.rows else stage

    def _join(self, request: Request, choice: Choice[LeaseT]) -> Stage | None:
        """Give a request a row; None: it has one, or has failed."""
        lease = None
        if request.adapter is not None:
            try:
                lease = self._loads.take(request.adapter, request.generation)
            except LoRAError as error:
                choice.failed[request.id] = error
                self._leave(request)
                return None
            if lease is None:
                return Stage.NO_SLOT
        self._leave(request)
        running = Running(request, lease, self.steps, self.steps + request.most_tokens)
        self._running.add(running)
        choice.joined.append(running)
        choice.rows -= 1
        return None

    def _fail(self, name: str, error: BaseException, choice: Choice[LeaseT]) -> None:
        """End all requests that wait for an adapter."""
        for request in self._waiting.of(name):
            choice.failed[request.id] = error
            self._waiting.remove(request)
        self._loads.drop(name)

    def _leave(self, request: Request) -> None:
        """Take a request out of its queue, and give back the slot that was held for its adapter."""
        self._waiting.remove(request)
        if request.adapter is not None and self._waiting.head(request.adapter) is None:
            self._loads.drop(request.adapter)

    def _stop(self, request_id: int) -> Running[LeaseT]:
        stopped = self._running.stop(request_id)
        self._loads.make_room()
        return stopped
