"""Runs whose logits stay on the device: each row's candidates alone come to the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap

TEMPERATURES = "temperatures"  # input of a ranked run [rows] float64; 0 is greedy


class RankedRows(NamedTuple):
    """The first tokens of each row in ranked order; see `CandidateBuffers`."""

    tokens: npt.NDArray[np.int32]  # [rows, candidates]
    logits: npt.NDArray[np.float32]  # [rows, candidates]
    totals: npt.NDArray[np.float64]  # [rows]
    not_finite: npt.NDArray[np.int32]  # [rows]
    rows: Sequence[Tensor]  # the logits [vocab] of each, on the device until the next run


class RankedRun(Protocol):
    """A run that comes again and again, of which one may be enqueued while another is under way.

    Not for several threads at a time. What it works on stays alive until it is done, also where
    nobody asks for its result.
    """

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Inputs on the host, `TEMPERATURES` among them: all to be written before each run.

        Two runs in succession have two sets of arrays.
        """
        ...

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors of the engine's memory; see `PreparedRun.bind`.

        Raises:
            TensorError: one is on the host, or the engine refuses its shape, dtype or device.
            StateError: a run is under way.
        """
        ...

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Begin a run.

        Args:
            is_fed: begin it behind the one under way, whose greedy tokens are its input and never
                leave the device: the ids in `inputs` are not looked at. What fails is raised by
                `result`.

        Raises:
            BackendError: the run failed, and is not fed.
            StateError: others are under way than the one it is fed of, or the engine was closed
                since.
        """
        ...

    def result(self) -> RankedRows:
        """Wait for the oldest run that is under way; its arrays change with the next but one.

        Raises:
            BackendError: the run failed; it is under way until `discard`.
            StateError: none is under way, or the engine was closed since.
        """
        ...

    def discard(self) -> None:
        """Wait for what is under way, and forget it with all that it failed of."""
        ...


@runtime_checkable
class RanksLogits(Protocol):
    """An executor that finds candidates where its logits are."""

    def prepare_ranked(self, tensor_map: TensorMap, *, logits: str, fed: str) -> RankedRun:
        """Make a run of these shapes.

        Args:
            tensor_map: as of `PreparesRuns.prepare`.
            logits: the output [rows, vocab] that is ranked; of all outputs only that counts.
            fed: the input int64 [rows, 1], on the host, that takes each row's greedy token.

        Raises:
            TensorError: an input is missing, or has a shape, dtype or device the engine refuses.
            BackendError: the device or the host is out of memory.
            StateError: called outside `with`.
        """
        ...

    def rank(self, logits: Tensor, temperatures: npt.NDArray[np.float64]) -> RankedRows:
        """Return the candidates of logits that `execute` has left on the device.

        Args:
            logits: [rows, vocab].
            temperatures: [rows]; 0 is greedy.

        Raises:
            TensorError: the logits are not on the device.
            BackendError: the run failed.
            StateError: called outside `with`.
        """
        ...
