"""A pre-bound run, replayed every step, with the search for the best tokens behind the engine."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.tensorrt.inputs import OutputShapes, RunInputs
from trt_lora.runtime.engines.tensorrt.mirrored_block import Mirror, MirroredBlock
from trt_lora.runtime.engines.tensorrt.run_key import RunKey, RunState, TopKSearch, frozen_copy
from trt_lora.runtime.engines.tensorrt.topk_search import (
    DeviceTopK,
    candidate_outputs,
    candidate_workspace,
    found_on_device,
    search_of,
)
from trt_lora.runtime.engines.topk import TEMPERATURES
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.cuda import Event
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, tensor_from_numpy

_KNOWN_KEYS = 32  # one for each adapter in turns


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
        enqueue: Callable[[RunKey, Mirror, Event, bool], None],
        wait: Callable[[Event], None],
    ) -> None:
        """Allocate the blocks and bind everything; see `Executor.prepare_topk`.

        Args:
            manifest: of the engine.
            memory: of its GPU, which is current.
            tensor_map: all inputs.
            logits: the output whose best tokens are found.
            fed: input that takes the greedy tokens.
            enqueue: give the engine's stream the copy in, without the first input where True, the
                run, the copy out, and the event.
            wait: for such an event.
        """
        names = [binding.name for binding in manifest.inputs]
        check_inputs(tensor_map, names)
        given = TensorMap({name: tensor_map[name] for name in names})
        on_host = {name: tensor for name, tensor in given.items() if tensor.device == HOST}
        outputs = OutputShapes(manifest).infer(given)
        rows = outputs[logits].shape[0]
        temperatures = tensor_from_numpy(np.zeros(rows, np.int64))  # the bits of float64
        inputs = {fed: on_host[fed], **on_host, TEMPERATURES: temperatures}  # what is fed is first
        self._block = block = MirroredBlock(
            memory,
            inputs,
            candidate_outputs(rows),
            scratch=outputs | candidate_workspace(outputs[logits]),
        )
        places = block.on_device
        search = search_of(places[logits], places, greedy=places[fed].pointer)
        self._bindings = RunBindings(manifest, memory, given, places, search)
        self._enqueue, self._wait, self._rows = enqueue, wait, rows
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
            self._enqueue(key, self._block.mirrors[mirror], self._events[mirror], is_fed)
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
        self._wait(self._events[mirror])
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


class RunBindings:
    """Inputs of the caller's, and a block of the run's own for all else."""

    def __init__(
        self,
        manifest: Manifest,
        memory: CudaMemory,
        tensor_map: TensorMap,
        block: Mapping[str, Tensor],
        search: TopKSearch,
    ) -> None:
        """Bind everything.

        Args:
            manifest: of the engine.
            memory: of its GPU.
            tensor_map: all inputs.
            block: where inputs on the host are copied to, and all outputs.
            search: that is launched behind the engine.

        Raises:
            TensorError: the engine refuses the shape, dtype or device of an input.
        """
        self._inputs, self._state = RunInputs(manifest, memory), RunState()
        self._search = search
        for output in manifest.outputs:
            if output.name in block:
                place = block[output.name]
                self._state.put(output.name, (place.pointer, place.shape))
        self._map = tensor_map
        self._keys: dict[RunKey, RunKey] = {}  # in the order of their making
        self.bind(TensorMap({b.name: block[b.name] for b in manifest.inputs if b.name in block}))

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors; what is the same is not looked at again by a run."""
        candidate = TensorMap(self._map | tensor_map)
        profile = self._inputs.update(candidate, self._state)
        if on_host := self._inputs.on_host:
            raise TensorError(
                f"{on_host[0]} lies on the host; a prepared run takes what the engine's memory "
                "made, or what was on the host when it was prepared"
            )
        found = replace(frozen_copy(self._state.key(profile)), search=self._search)
        self.key, self._map = self._known(found), candidate

    def _known(self, key: RunKey) -> RunKey:
        """The same object for the same run: its graph is found without comparing addresses."""
        if key not in self._keys:
            if len(self._keys) == _KNOWN_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[key] = key
        return self._keys[key]


def _with_temperatures(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    return {**inputs, TEMPERATURES: inputs[TEMPERATURES].view(np.float64)}


def _finish(events: Iterable[Event], *held: object) -> None:
    """Wait for what is under way, on which the memory of `held` depends; a lost device has none."""
    for event in events:
        with contextlib.suppress(BackendError):
            event.wait()
    del held
