"""A pool without threads: what is submitted runs when a test says so."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DeferredExecutor(Executor):
    """Keeps calls in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.calls.clear()

    def run(self, count: int | None = None) -> None:
        """Run the first calls, or all."""
        calls = self.calls[:count]
        del self.calls[:count]
        for future, call in calls:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
