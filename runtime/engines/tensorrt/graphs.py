"""LRU cache of captured CUDA graphs, keyed by run."""

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime.engines.tensorrt.context import BoundContext
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, frozen_copy
from trt_lora.runtime.memory.cuda import call, constant, try_call, uncollected

MAX_GRAPHS = 32  # at a time, each with an execution context
_GIVE_UP_AFTER = 3  # captures that failed where none succeeded

_LOG = logging.getLogger(__name__)


class GraphCache:
    """Graphs by run, those launched last kept; for one stream.

    A graph holds addresses and shapes, an adapter's among them, and is launched only for a run
    that agrees in all. A run is captured when it comes again among the last `max_graphs` that were
    not captured. So runs that repeat after more than that (the tokens of a long answer, each with
    a longer cache) are never captured, instead of each driving the next one's graph out.

    Each graph has an execution context of its own, because changing a context leaves the graphs
    captured from it undefined. The contexts share their activation memory, which a single stream
    allows.

    Memory that is freed needs no graph to be dropped: kernels and copies of a graph hold plain
    addresses, and they are launched only while the caller's tensors lie at all of them. Memory
    that was freed and mapped again for such a tensor is memory of the same GPU at that address.
    The activation memory lives as long as the engine is open, and `clear` goes before it.

    Nothing here waits: what is under way is of one run, and the engine waits for its stream before
    it begins another, so that a graph that is driven out has run to its end.
    """

    def __init__(
        self,
        max_graphs: int,
        stream: int,
        new_context: Callable[[], BoundContext],
        plugin_calls: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Have no graphs yet; `plugin_calls` is held while a plugin may be called: at no launch."""
        self._max_graphs = max_graphs
        self._stream = stream
        self._new_context = new_context
        self._plugin_calls = plugin_calls
        self._graphs: OrderedDict[RunKey, _Graph] = OrderedDict()
        self._once: OrderedDict[RunKey, None] = OrderedDict()  # ran without a graph
        self._refused: OrderedDict[RunKey, None] = OrderedDict()  # cannot be captured
        self._failures = 0  # captures that failed, as long as none has succeeded
        self._succeeded = self._told = False

    def run(self, key: RunKey, *, repeats: bool = False) -> bool:
        """Enqueue the run if it has a graph, or as it is captured; otherwise return False.

        Args:
            key: the run.
            repeats: it was made to come again, with this very key, which stays as it is: it is
                found at once, and captured at once if no graph has to go.
        """
        if not self._max_graphs or self._failures == _GIVE_UP_AFTER:
            return False
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            graph.launch(self._stream)
            return True
        if key in self._refused:
            return False
        has_room = len(self._graphs) < self._max_graphs
        if key not in self._once and not (repeats and has_room):
            self._remember(self._once, key if repeats else frozen_copy(key))
            return False
        self._once.pop(key, None)
        return self._capture(key if repeats else frozen_copy(key))

    def clear(self) -> None:
        """Destroy all graphs and their contexts; their stream has passed."""
        for runs in (self._graphs, self._once, self._refused):
            runs.clear()

    def _capture(self, key: RunKey) -> bool:
        """Run once in a context of its own, as TensorRT asks before a capture, then capture.

        Return whether the run was enqueued; the graph is launched from the next time on.
        """
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        ran = False
        context = None
        try:
            context = self._new_context()
            with self._plugin_calls():
                context.run(key)
            ran = True
            self._graphs[key] = self._graph_of(context)
            self._succeeded = True
        except BaseException as error:
            try_call("cudaStreamSynchronize", self._stream)  # the context must not go before
            if not isinstance(error, BackendError | TensorError):
                raise
            self._refuse(key, error)
        return ran

    def _graph_of(self, context: BoundContext) -> "_Graph":
        """Capture; once more if it fails, for it may be that this thread has just freed memory."""
        try:
            return self._try_graph_of(context)
        except BackendError:
            return self._try_graph_of(context)

    def _try_graph_of(self, context: BoundContext) -> "_Graph":
        with self._plugin_calls():  # where a plugin failed, this raises, and the graph goes
            return _Graph(context, self._stream)

    def _refuse(self, key: RunKey, error: Exception) -> None:
        self._remember(self._refused, key)
        self._failures += not self._succeeded
        if not self._told:  # with the text alone: the error holds the memory of the run
            _LOG.warning(
                "runs go on without a CUDA graph that could not be captured: %s", str(error)
            )
        self._told = True

    def _remember(self, runs: OrderedDict[RunKey, None], key: RunKey) -> None:
        runs[key] = None
        if len(runs) > self._max_graphs:
            runs.popitem(last=False)


class _Graph:
    """One captured run and the context it was captured from, which must stay as it is."""

    def __init__(self, context: BoundContext, stream: int) -> None:
        self._context = context
        self._launchable = _captured(context, stream)
        weakref.finalize(self, try_call, "cudaGraphExecDestroy", self._launchable)
        call("cudaGraphUpload", self._launchable, stream)  # else a decode step waits for it

    def launch(self, stream: int) -> None:
        call("cudaGraphLaunch", self._launchable, stream)


def _captured(context: BoundContext, stream: int) -> Any:
    """Return a graph of what `context` enqueues, ready to launch.

    Thread-local capture: other threads may allocate meanwhile, as torch does. In this thread what
    cannot be part of a graph, such as an allocation or a wait in a plugin, makes the capture fail;
    in relaxed mode it would be left out of the graph in silence.

    Raises:
        BackendError: the run cannot be captured.
    """
    ask = getattr(context.context, "is_stream_capturable", None)  # full TensorRT has none
    if ask is not None and not ask(stream):
        raise BackendError(
            "TensorRT-RTX says that this engine's stream cannot be captured; build it with "
            "BuilderFlag.REQUIRE_USER_ALLOCATION"
        )
    mode = constant("cudaStreamCaptureMode").cudaStreamCaptureModeThreadLocal
    with uncollected():
        call("cudaStreamBeginCapture", stream, mode)
        try:
            context.enqueue()
        except BaseException:
            with contextlib.suppress(BackendError):  # the stream must not stay in capture
                try_call("cudaGraphDestroy", call("cudaStreamEndCapture", stream))
            raise
        graph = call("cudaStreamEndCapture", stream)
    try:
        return call("cudaGraphInstantiate", graph, 0)
    finally:
        try_call("cudaGraphDestroy", graph)
