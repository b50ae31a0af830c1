"""GPU engine on TensorRT or TensorRT-RTX: one stream, CUDA graphs for repeated runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import StateError, TensorError
from trt_lora.plugins.short_repr import short_value
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.engines.engine import closed, open_already
from trt_lora.runtime.engines.tensorrt.graphs import MAX_GRAPHS
from trt_lora.runtime.engines.tensorrt.inputs import warm_up_inputs
from trt_lora.runtime.engines.tensorrt.mirrored_block import Mirror
from trt_lora.runtime.engines.tensorrt.plan import Plan
from trt_lora.runtime.engines.tensorrt.plan_runner import PlanRunner
from trt_lora.runtime.engines.tensorrt.run_key import RunKey
from trt_lora.runtime.engines.tensorrt.topk_run import TensorRTTopKRun
from trt_lora.runtime.engines.tensorrt.topk_search import DeviceTopK
from trt_lora.runtime.manifest import ENCODER_FILES, STEP_FILES, GraphFiles, Manifest
from trt_lora.runtime.memory.cuda import Event, call, on_device, try_call
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class TensorRTEngine:
    """An `Engine` on a GPU. LoRA weights and cache stay on the device; tokens are uploaded.

    Who waits for whom: all work of the engine is enqueued on one stream of its own. At each run
    that stream waits for what the default stream was given before: that is where tensors of other
    libraries are ready (`tensor_from` asks for it), and where callers may write to them. Whoever
    writes on other streams waits before calling `execute`. `execute` waits for its stream before
    it returns, so that every stream and the host may use the outputs, and inputs may be let go of.
    A run of `prepare_topk` alone is under way when `enqueue` returns: it holds what it uses, and
    its result is asked for before another stream writes to that.

    The stream does not wait for the default stream by itself, nor that for it: work of other
    threads on the default stream would make a capture fail. Any number of threads may call
    `execute`: one run follows the other, whole, for all contexts share the stream and the
    activation memory. Other threads may upload and let go of tensors meanwhile. All of it happens
    on the GPU that was current when the engine was opened; every thread keeps its own.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        max_graphs: int = MAX_GRAPHS,
        files: GraphFiles = STEP_FILES,
    ) -> None:
        """Describe the engine; nothing touches the GPU before `with`.

        Args:
            directory: the engine's.
            manifest: of the same directory.
            max_graphs: CUDA graphs that are kept at a time; 0 captures none.
            files: of the graph that it runs, which `manifest` speaks of.

        Raises:
            ConfigError: it is below 0.
        """
        check_range("max_graphs", max_graphs, 0)
        self.directory = directory
        self.manifest = manifest
        self.memory = CudaMemory()
        self.rank_multiple = manifest.rank_multiple
        self.input_names = tuple(binding.name for binding in manifest.inputs)
        self.output_names = tuple(binding.name for binding in manifest.outputs)
        self._flavour = flavour_named(manifest.flavour)
        self._max_graphs, self._files = max_graphs, files
        self.encoder: TensorRTEngine | None = None
        if manifest.encoder:  # sources have many lengths: no graph of one would be used again
            self.encoder = TensorRTEngine(
                directory, manifest.of_encoder, max_graphs=0, files=ENCODER_FILES
            )
        self._open: PlanRunner | None = None
        self._lock = Lock()  # held by a run from its first binding to its last byte

    def __repr__(self) -> str:
        """Return where it is from, and whether it is open."""
        state = "closed" if self._open is None else "open"
        return f"<{type(self).__name__} {short_value(str(self.directory))}, {state}>"

    def __enter__(self) -> Self:
        """Load the plan onto the current GPU; `warm_up` is left to the caller.

        Raises:
            BackendError: the library cannot be imported, or refuses the plan on this GPU.
            StateError: the engine is open already.
        """
        with self._lock:
            if self._open is not None:
                raise open_already()
            memory = CudaMemory(int(call("cudaGetDevice")))
            plan = Plan(self.directory, self.manifest, self._flavour, memory, self._files)
            self._open = PlanRunner(self.manifest, plan, memory, self._max_graphs)
            self.memory = memory
        if self.encoder is not None:
            try:
                self.encoder.__enter__()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        """Release graphs, contexts, plan, stream and memory, and write the runtime cache.

        It waits for the run under way in another thread. Tensors stay until their owners let go.
        """
        if self.encoder is not None:
            self.encoder.__exit__()
        with self._lock:
            runner, self._open = self._open, None
            if runner is not None:
                with on_device(self.memory.index, try_call):
                    runner.close()
            self.memory.close()

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the plan once and wait for it; see `Executor.execute`."""
        with self._alone() as runner:
            return runner.execute(tensor_map)

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> TensorRTTopKRun:
        """Make a run that is replayed; see `Executor.prepare_topk`."""
        with self._alone() as runner:
            return TensorRTTopKRun(
                self.manifest,
                self.memory,
                tensor_map,
                logits=logits,
                fed=fed,
                enqueue=partial(self._replay, runner),
                wait=partial(self._wait, runner),
            )

    def topk(self, logits: Tensor, temperatures: npt.NDArray[np.float64]) -> DeviceTopK:
        """Find the best tokens; see `Executor.topk`."""
        with self._alone() as runner:
            if logits.device != self.memory.device:
                raise TensorError(
                    f"the logits are on {logits.device}, the engine on {self.memory.device}; pass "
                    "what its own `execute` returned"
                )
            return runner.topk(logits, temperatures)

    def release_inputs(self) -> None:
        """Do nothing: the engine keeps addresses of earlier inputs, and no memory."""

    def warm_up(self) -> None:
        """Run every profile once, at the shapes it is tuned for, on zeros and the base model.

        So the first token of a user does not wait for what TensorRT does at a first run.
        TensorRT-RTX's kernels, also those of earlier runs, are in the file of its cache then,
        however the program ends. It takes about as long as a prompt of full length; in a new cache,
        as long as compiling takes.

        Raises:
            BackendError: the device is out of memory.
            StateError: called outside `with`.
        """
        for ranges in self.manifest.profiles.values():
            self.execute(warm_up_inputs(self.manifest, ranges, self.memory))
        with self._alone() as runner:
            runner.save_cache()
        if self.encoder is not None:
            self.encoder.warm_up()

    @contextmanager
    def _alone(self) -> Iterator[PlanRunner]:
        """Give this thread the engine and its GPU, one thread at a time."""
        with self._lock:
            if self._open is None:
                raise closed()
            with on_device(self.memory.index):
                yield self._open

    def _replay(
        self, prepared_for: PlanRunner, key: RunKey, mirror: Mirror, copied: Event, is_fed: bool
    ) -> None:
        with self._alone() as runner:
            _check_same(runner, prepared_for)
            runner.replay(key, mirror, copied, is_fed=is_fed)

    def _wait(self, prepared_for: PlanRunner, copied: Event) -> None:
        with self._lock:
            _check_same(self._open, prepared_for)
            copied.wait()


def _check_same(found: PlanRunner | None, prepared_for: PlanRunner) -> None:
    """Refuse a run of an engine that was closed since it was prepared, with StateError."""
    if found is None:
        raise closed()
    if found is not prepared_for:
        raise StateError("the engine was closed since this run was prepared; prepare it anew")
