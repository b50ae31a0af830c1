"""A CUDA runtime without a GPU: a strict stand-in for the module `cuda.bindings.runtime`.

* Device addresses are no host addresses: code that reads device memory in place crashes.
* Work happens when its stream is waited for, and not before. Streams promise each other no order,
  as with the streams of torch and with per-thread default streams.
* Memory, streams and events are of the GPU that was current when they were made, and used there;
  a thread begins on GPU 0, and each GPU has a default stream of its own.
* Memory is garbage before it is written and after it is freed, and no address is used twice.
* A copy from pinned memory finds there what was there when it was enqueued. The target of a copy
  to the host is garbage until the copy is done; where it is not pinned, the host waits at once.
* What is enqueued while a stream is captured is part of a graph, and happens when that is launched;
  a graph is launched only while all memory is there that it uses.
* The thread that captures may not allocate or free pinned memory, load a library, or use the
  default stream, for which TensorRT's own may wait: that is refused, and the capture invalid.
* An error stays until somebody asks for the last one.
* What breaks a rule raises `Violation` and is kept in `violations`, also when a finalizer did it.
"""

# functions and constants have NVIDIA's names
import threading
from dataclasses import replace
from typing import Any

from support.fakes.fake_cuda_memory import FakeCudaMemory
from support.fakes.fake_cuda_state import SUCCESS, CaptureMode, Event, Graph, Status, Stream, Work

HIGHEST_PRIORITY = -5
UNSAFE = ("cudaMallocHost", "cudaFreeHost")  # in the thread that captures
STREAM_LAST = (  # functions whose last argument is a stream
    *("cudaMallocAsync", "cudaFreeAsync", "cudaMemcpyAsync", "cudaMemcpy2DAsync"),
    *("cudaMemsetAsync", "cudaStreamSynchronize", "cudaEventRecord"),
)


class FakeCuda(FakeCudaMemory):
    """The functions of `cuda.bindings.runtime` that the package uses."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__(devices)
        self._capturing: dict[int, int] = {}  # the thread that captures, by stream

    def invalidates_a_capture(self) -> bool:
        """Whether this thread captures; if so, what it has called invalidates that."""
        own = {s for s, thread in self._capturing.items() if thread == threading.get_ident()}
        self._invalid |= own
        return bool(own)

    def cudaStreamCreate(self) -> tuple[Status, Stream | None]:
        """Make a stream."""
        if status := self._enter("cudaStreamCreate"):
            return status, None
        return SUCCESS, self._new_stream()

    def cudaDeviceGetStreamPriorityRange(self) -> tuple[Status, int, int]:
        """Return the least and the highest priority of streams."""
        return self._enter("cudaDeviceGetStreamPriorityRange"), 0, HIGHEST_PRIORITY

    def cudaStreamCreateWithPriority(
        self, flags: int, priority: int
    ) -> tuple[Status, Stream | None]:
        """Make a stream that does not wait for the default stream."""
        if status := self._enter("cudaStreamCreateWithPriority", flags, priority):
            return status, None
        if flags != self.cudaStreamNonBlocking:
            self.violate("a stream of ours waits for nobody's default stream")
        return SUCCESS, self._new_stream()

    def cudaStreamDestroy(self, stream: Any) -> tuple[Status]:
        """Destroy a stream on which nothing is left to do."""
        if status := self._enter("cudaStreamDestroy", stream):
            return (status,)
        if self._queue("cudaStreamDestroy", self._on(stream)) or self._on(stream) <= 0:
            self.violate(f"cudaStreamDestroy: stream {self._on(stream)} is in use")
        del self._streams[self._on(stream)]
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Status]:
        """Do the work of a stream."""
        status = self._enter("cudaStreamSynchronize", stream)
        if self._lost:
            return (status,)
        queue = self._queue("cudaStreamSynchronize", self._on(stream))
        if self._on(stream) in self._captures:
            self._invalid.add(self._on(stream))
            self.last_error = Status.cudaErrorStreamCaptureUnsupported
            return (self.last_error,)
        while queue:
            self._do_next(queue)
        for block in self._device:
            if block.home == self._on(stream):
                block.home = None
        return (status,)  # an error of the work: it has ended all the same

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Status, Event | None]:
        """Make an event."""
        if status := self._enter("cudaEventCreateWithFlags", flags):
            return status, None
        self._events.append(Event(self.current_device))
        return SUCCESS, self._events[-1]

    def cudaEventRecord(self, event: Event, stream: Any) -> tuple[Status]:
        """Let the event stand for all that is on the stream now."""
        if status := self._enter("cudaEventRecord", event, stream):
            return (status,)
        self._check_alive("cudaEventRecord", event)
        queue = self._queue("cudaEventRecord", self._on(stream))
        if self.device_of(stream) != event.device:
            self.violate(f"cudaEventRecord: an event of GPU {event.device} and a stream of another")
        event.last = queue[-1] if queue else None
        return (SUCCESS,)

    def cudaEventSynchronize(self, event: Event) -> tuple[Status]:
        """Do the work of a stream up to the event."""
        if status := self._enter("cudaEventSynchronize", event):
            return (status,)
        self._check_alive("cudaEventSynchronize", event)
        self._do_up_to(event.last)
        return (SUCCESS,)

    def cudaStreamWaitEvent(self, stream: Any, event: Event, flags: int) -> tuple[Status]:
        """Let what is enqueued on the stream from now on happen after the event."""
        if status := self._enter("cudaStreamWaitEvent", stream, event, flags):
            return (status,)
        self._check_alive("cudaStreamWaitEvent", event)
        last = event.last
        self.enqueue(Work("a wait", self._on(stream), (), lambda: self._do_up_to(last)))
        return (SUCCESS,)

    def cudaEventDestroy(self, event: Event) -> tuple[Status]:
        """Destroy an event."""
        if status := self._enter("cudaEventDestroy", event):
            return (status,)
        self._check_alive("cudaEventDestroy", event)
        event.destroyed = True
        return (SUCCESS,)

    def cudaStreamBeginCapture(self, stream: Any, mode: CaptureMode) -> tuple[Status]:
        """Capture what is enqueued on the stream from now on, instead of doing it."""
        if status := self._enter("cudaStreamBeginCapture", stream, mode):
            return (status,)
        self._queue("cudaStreamBeginCapture", self._on(stream))
        if mode is not CaptureMode.cudaStreamCaptureModeThreadLocal:
            self.violate(f"a capture in {mode.name} is disturbed by others, or hides mistakes")
        if self._on(stream) <= 0 or self._on(stream) in self._captures:
            self.violate(f"cudaStreamBeginCapture: stream {self._on(stream)} cannot be captured")
        self._captures[self._on(stream)] = []
        self._capturing[self._on(stream)] = threading.get_ident()
        return (SUCCESS,)

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Status, Graph | None]:
        """End a capture; also a failing call ends it."""
        status = self._enter("cudaStreamEndCapture", stream)
        if self._on(stream) not in self._captures:
            self.violate(f"cudaStreamEndCapture: stream {self._on(stream)} is not captured")
        works = self._captures.pop(self._on(stream))
        del self._capturing[self._on(stream)]
        if self._on(stream) in self._invalid:
            self._invalid.discard(self._on(stream))
            status = status or Status.cudaErrorStreamCaptureInvalidated
            self.last_error = status
        if status:
            return status, None
        self.graphs.append(Graph(works))
        return SUCCESS, self.graphs[-1]

    def cudaGraphInstantiate(self, graph: Graph, flags: int) -> tuple[Status, Graph | None]:
        """Make a graph that can be launched."""
        if status := self._enter("cudaGraphInstantiate", graph, flags):
            return status, None
        self._check_alive("cudaGraphInstantiate", graph)
        self.graphs.append(Graph(graph.works, launchable=True))
        return SUCCESS, self.graphs[-1]

    def cudaGraphUpload(self, graphExec: Graph, stream: Any) -> tuple[Status]:
        """Bring a graph to the GPU, which its first launch would do."""
        if status := self._enter("cudaGraphUpload", graphExec, stream):
            return (status,)
        self._check_alive("cudaGraphUpload", graphExec)
        self._queue("cudaGraphUpload", self._on(stream))
        return (SUCCESS,)

    def cudaGraphLaunch(self, graphExec: Graph, stream: Any) -> tuple[Status]:
        """Enqueue all that was captured."""
        if status := self._enter("cudaGraphLaunch", graphExec, stream):
            return (status,)
        self._check_alive("cudaGraphLaunch", graphExec)
        if not graphExec.launchable or graphExec.stale:
            self.violate(f"cudaGraphLaunch: {graphExec.stale or 'it was not instantiated'}")
        for work in graphExec.works:
            if any(block.freed for block in work.blocks):
                self.violate(f"cudaGraphLaunch: {work.what} uses memory that was freed")
            self.enqueue(replace(work, stream=self._on(stream), owner=graphExec, done=False))
        return (SUCCESS,)

    def cudaGraphDestroy(self, graph: Graph) -> tuple[Status]:
        """Destroy a captured graph."""
        if status := self._enter("cudaGraphDestroy", graph):
            return (status,)
        self._destroy_graph("cudaGraphDestroy", graph, launchable=False)
        return (SUCCESS,)

    def cudaGraphExecDestroy(self, graphExec: Graph) -> tuple[Status]:
        """Destroy a launchable graph that is not running."""
        if status := self._enter("cudaGraphExecDestroy", graphExec):
            return (status,)
        self._destroy_graph("cudaGraphExecDestroy", graphExec, launchable=True)
        return (SUCCESS,)

    # The rules.

    def _enter(self, function: str, *args: Any) -> Status:
        status = super()._enter(function, *args)
        is_on_default = function in STREAM_LAST and self._on(args[-1]) <= 0
        if (function in UNSAFE or is_on_default) and self.invalidates_a_capture():
            status = self.last_error = status or Status.cudaErrorStreamCaptureUnsupported
        return status

    def _new_stream(self) -> Stream:
        self._next_stream += 1
        self._streams[self._next_stream] = []
        self._homes[self._next_stream] = self.current_device
        return Stream(self._next_stream)

    def _destroy_graph(self, what: str, graph: Graph, *, launchable: bool) -> None:
        self._check_alive(what, graph)
        if graph.launchable != launchable:
            self.violate(f"{what} is for the other kind of graph")
        graph.destroyed = True  # also if it is a mistake, which is told once
        if self.pending(graph):
            self.violate(f"{what}: the graph is running")
