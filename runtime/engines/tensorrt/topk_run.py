"""A pre-bound run, replayed every step, with the search for the best tokens behind the engine."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime.engines.tensorrt.mirrored_block import Mirror, MirroredBlock
from trt_lora.runtime.engines.tensorrt.run_bindings import (
    RunBindings,
    outputs_of,
    split_inputs,
)
from trt_lora.runtime.engines.tensorrt.run_key import RunKey
from trt_lora.runtime.engines.tensorrt.topk_search import (
    DeviceTopK,
    candidate_shapes,
    found_on_device,
    search_of,
    workspace_shape,
)
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.cuda import Event
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy


@dataclass(frozen=True)
class TopKCalls:
    """What a run asks of its engine."""

    # Enqueue the copy in, without the first input where True, the run, the copy out, the event.
    enqueue: Callable[[RunKey, Mirror, Event, bool], None]
    wait: Callable[[Event], None]


class TensorRTTopKRun:
    """A `TopKRun`; see there. Nothing is allocated or bound in `enqueue`.

    The engine, the search for candidates and their feedback work on one device block, and are one
    graph. The copies are no part of it: they go to two pinned blocks in turns, so that a run leaves
    what the run before brought to the host.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        tensor_map: TensorMap,
        *,
        logits: str,
        fed: str,
        calls: TopKCalls,
    ) -> None:
        """Allocate the blocks and bind everything; see `Executor.prepare_topk`.

        Args:
            manifest: of the engine.
            memory: of its GPU, which is current.
            tensor_map: all inputs.
            logits: the output whose best tokens are found.
            fed: input that takes the greedy tokens.
            calls: run the engine.
        """
        given, on_host = split_inputs(manifest, tensor_map)
        outputs = outputs_of(manifest, given)
        (found,) = (Tensor(0, shape, dtype) for name, dtype, shape in outputs if name == logits)
        rows = found.shape[0]
        temperatures = tensor_from_numpy(np.zeros(rows, np.int64))  # the bits of float64
        inputs = {fed: on_host[fed], **on_host, TEMPERATURES: temperatures}  # what is fed is first
        self._block = block = MirroredBlock(
            memory,
            inputs,
            candidate_shapes(rows),
            scratch=[*outputs, workspace_shape(found)],
        )
        places = block.on_device
        search = search_of(places[logits], places, greedy=places[fed].pointer)
        self._bindings = RunBindings(manifest, memory, given, places, search)
        self._calls, self._rows = calls, rows
        self._events = tuple(Event() for _ in block.mirrors)
        self._inputs = tuple(_with_temperatures(mirror.inputs) for mirror in block.mirrors)
        self._found = tuple(
            found_on_device(mirror.outputs, inputs[TEMPERATURES], places[logits])
            for mirror, inputs in zip(block.mirrors, self._inputs, strict=True)
        )
        self._next = 0  # the mirror of the next run
        self._under_way: deque[tuple[int, str]] = deque()
        # What is under way uses the block and all that is bound: the finalizer holds both.
        weakref.finalize(self, _finish, self._events, block, self._bindings)

    @property
    def inputs(self) -> Mapping[str, Array]:
        """What the caller writes before a run."""
        return self._inputs[self._next]

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors; nothing uses those before any more."""
        self._check_under_way(0)
        self._bindings.bind(tensor_map)

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Begin a run; see `TopKRun.enqueue`."""
        mirror = self._next
        self._check_under_way(int(is_fed))
        failure = ""  # with the text alone: the error holds the memory of the run
        try:
            key = self._bindings.key
            self._calls.enqueue(key, self._block.mirrors[mirror], self._events[mirror], is_fed)
        except BackendError as error:
            if not is_fed:
                raise
            failure = f"the run of {self._rows} rows that was begun ahead: {error}"
        self._under_way.append((mirror, failure))
        self._next = 1 - mirror

    def result(self) -> DeviceTopK:
        """Wait for the oldest run; see `TopKRun.result`."""
        if not self._under_way:
            raise StateError("no run is under way; enqueue one")
        mirror, failure = self._under_way[0]
        if failure:
            raise BackendError(failure)
        self._calls.wait(self._events[mirror])
        self._under_way.popleft()
        return self._found[mirror]

    def discard(self) -> None:
        """Wait for what is under way, and forget it."""
        _finish(self._events)
        self._under_way.clear()

    def _check_under_way(self, expected: int) -> None:
        if len(self._under_way) != expected:
            raise StateError(
                f"{len(self._under_way)} runs are under way, not {expected}; ask for results first"
            )


def _with_temperatures(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return {**inputs, TEMPERATURES: inputs[TEMPERATURES].view(np.float64)}


def _finish(events: Iterable[Event], *held: object) -> None:
    """Wait for what is under way, on which the memory of `held` depends; a lost device has none."""
    for event in events:
        with contextlib.suppress(BackendError):
            event.wait()
    del held
