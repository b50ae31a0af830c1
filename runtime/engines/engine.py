"""Executor and engine protocols, and input checks shared by the backends."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import StateError, TensorError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.engines.topk import TopK, TopKRun
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


@runtime_checkable
class Executor(Protocol):
    """An engine that can be run inside `with`; nothing touches a GPU before."""

    @property
    def manifest(self) -> Manifest:
        """The engine's manifest: its inputs, sites and limits."""
        ...

    @property
    def memory(self) -> Memory:
        """Allocator on the engine's device."""
        ...

    @property
    def rank_multiple(self) -> int:
        """Multiple that ranks are zero-padded to when an adapter is loaded; 1 pads nothing."""
        ...

    def release_inputs(self) -> None:
        """Let go of the inputs of earlier runs; the next run binds its own anew."""
        ...

    @property
    def input_names(self) -> Sequence[str]:
        """Names of all inputs, in the engine's order."""
        ...

    @property
    def output_names(self) -> Sequence[str]:
        """Names of all outputs, in the engine's order."""
        ...

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run the engine once and return every output, in memory that the result owns.

        Any number of threads may call it; each has the outputs of its own inputs, which nobody
        may write to before it returns.

        Raises:
            TensorError: an input is missing, or has a shape, dtype or device the engine refuses.
            StateError: called outside `with`.
        """
        ...

    def topk(self, logits: Tensor, temperatures: npt.NDArray[np.float64]) -> TopK:
        """Return the best tokens of logits that `execute` has left.

        Args:
            logits: [rows, vocab].
            temperatures: that totals will be asked at [rows]; 0 is greedy.

        Raises:
            TensorError: the logits are not where the engine leaves them.
            BackendError: the search failed.
            StateError: called outside `with`.
        """
        ...

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> TopKRun:
        """Make a run of these shapes, which costs the host less than `execute`.

        Args:
            tensor_map: every input. Those in the engine's memory are bound as they are; those on
                the host, for an engine on a GPU, are copied to memory of the run. The caller may
                change the values of both in `TopKRun.inputs`.
            logits: the output [rows, vocab] whose best tokens are found; no other counts.
            fed: the input int64 [rows, 1], on the host, that can take each row's greedy token.

        Raises:
            TensorError: an input is missing, or has a shape, dtype or device the engine refuses.
            BackendError: the device or the host is out of memory.
            StateError: called outside `with`.
        """
        ...


@runtime_checkable
class EngineExecutor(Executor, Protocol):
    """An executor as `open_executor` returns it: a context manager over an engine directory.

    It is open once at a time, and may be entered again after it was left.
    """

    @property
    def directory(self) -> Path:
        """The engine directory."""
        ...

    def __enter__(self) -> Self:
        """Load the engine.

        Raises:
            BackendError: it cannot be loaded.
            StateError: it is open already.
        """
        ...

    def __exit__(self, *error: object) -> None:
        """Refuse further runs, wait for those under way in other threads, release everything."""
        ...

    def warm_up(self) -> None:
        """Do what a first run would do, and keep it beside the engine where it can be kept.

        Raises:
            BackendError: the device is out of memory.
            StateError: called outside `with`.
        """
        ...


@runtime_checkable
class _WithEncoder(Protocol):
    encoder: Executor | None


def encoder_of(executor: Executor) -> Executor | None:
    """Return what runs the encoder of an engine; None of a decoder alone."""
    return executor.encoder if isinstance(executor, _WithEncoder) else None


def directory_of(executor: Executor) -> Path | None:
    """Return where an engine lies; None where its executor does not say."""
    return executor.directory if isinstance(executor, EngineExecutor) else None


def check_inputs(tensor_map: TensorMap, input_names: Collection[str]) -> None:
    """Refuse a tensor map that lacks an input, with TensorError."""
    missing = [name for name in input_names if name not in tensor_map]
    if missing:
        raise TensorError(
            f"the tensor map lacks {listed(missing)}; "
            "LoRA bindings are written by LoRAManager.refresh_tensor_map"
        )


def closed() -> StateError:
    """Return the error of a run outside `with`."""
    return StateError("the engine is closed; use: with open_engine(directory) as engine")


def open_already() -> StateError:
    """Return the error of an engine that is entered twice."""
    return StateError("the engine is open already; make another one of the same directory")
