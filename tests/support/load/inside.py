"""What servers of this process have opened: their stores and schedulers.

Nothing of it is asked over HTTP, so that a test can compare it with what HTTP says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from support.eventually import eventually

from trt_lora.runtime import Engine
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.store.store import AdapterStore


@dataclass
class Inside:
    """The newest engine, and its scheduler."""

    engine: Engine | None = None
    scheduler: Scheduler | None = None
    newest: Sequence | None = None  # request

    @property
    def adapters(self) -> AdapterStore:
        """The store."""
        assert self.engine is not None
        return self.engine.adapters

    def check_integrity(self) -> None:
        """Requests, rows, leases, slots and bytes add up, where nothing runs any more."""
        assert self.scheduler is not None
        scheduler = self.scheduler
        assert eventually(lambda: not len(scheduler))
        scheduler.check_integrity()
        assert self.adapters.stats.leased == 0


@contextmanager
def inside() -> Iterator[Inside]:
    """Note what servers open while the context lasts."""
    found, serve, requests = Inside(), Engine.serve, Scheduler.requests

    def served(engine: Engine, *arguments: Any) -> Scheduler:
        found.engine, found.scheduler = engine, serve(engine, *arguments)
        return found.scheduler

    def asked(scheduler: Scheduler, *arguments: Any, **options: Any) -> list[Sequence]:
        made = requests(scheduler, *arguments, **options)
        found.newest = made[-1]
        return made

    with patch.object(Engine, "serve", served), patch.object(Scheduler, "requests", asked):
        yield found
