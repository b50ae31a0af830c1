"""Top-k of logits: the best tokens of each row of a run, and runs that find them at every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import TensorMap

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Temperatures = Sequence[float | None]  # by row, 0 is greedy; None: nothing is asked of it

TEMPERATURES = "temperatures"  # input of a `TopKRun` [rows] float64; 0 is greedy
NO_TOKEN = -1  # in place of a token, where all logits are -inf


@dataclass(frozen=True)
class Candidates:
    """The first tokens of each row, best first: greatest logit first, of equals the lower id."""

    tokens: npt.NDArray[np.int32] | Tokens  # [rows, count]
    logits: Logits  # [rows, count]; where a row has fewer tokens, -inf behind them
    # Of [rows]: exp((logit - greatest) / temperature) added up over the whole vocabulary. That is
    # the log-sum-exp without its greatest term, which would round off the rest of a small
    # temperature. NaN where it is not known.
    totals: Floats
    vocabulary: int
    # Of [rows, blocks of 256 ids]: the same by blocks. None where a device has found what is here.
    blocks: Logits | None = None

    def select(self, rows: Sequence[int]) -> "Candidates":
        """Return those of some rows; of the first rows it is no copy."""
        at = index_of(rows)
        return Candidates(
            self.tokens[at],
            self.logits[at],
            self.totals[at],
            self.vocabulary,
            None if self.blocks is None else self.blocks[at],
        )


def index_of(rows: Sequence[int]) -> slice | list[int]:
    """Return what numpy takes rows by: the first ones in place."""
    return slice(len(rows)) if [*rows] == [*range(len(rows))] else [*rows]


class TopK(Protocol):
    """What a run has found of its rows; it is looked at before the run comes again."""

    @property
    def vocabulary(self) -> int:
        """How many logits a row has."""
        ...

    def __len__(self) -> int:
        """How many rows there are."""
        ...

    def is_finite(self) -> Mask:
        """Return which rows have logits that are all finite [rows]."""
        ...

    def first(self) -> Tokens:
        """Return the best token of each row [rows]; `NO_TOKEN` where all logits are -inf."""
        ...

    def candidates(self, rows: Sequence[int], count: int, temperatures: Temperatures) -> Candidates:
        """Return the best tokens of some rows.

        Args:
            rows: that have a token.
            count: tokens of each; a device has found as many as it was made for.
            temperatures: of the totals [rows].
        """
        ...

    def logits(self, rows: Sequence[int]) -> list[Logits]:
        """Return all logits of some rows, each [vocab] on the host: a copy from a device."""
        ...

    def select(self, rows: Sequence[int]) -> "TopK":
        """Return what was found of some rows."""
        ...


class TopKRun(Protocol):
    """A pre-bound run, replayed every step, of which the best tokens of each row are found.

    Not for several threads at a time. What it works on stays alive until it is done, also where
    its result is not asked for.
    """

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Inputs on the host, `TEMPERATURES` among them: all to be written before each run.

        Two runs in succession may have two sets of arrays.
        """
        ...

    def bind(self, tensor_map: TensorMap) -> None:
        """Take other tensors of the engine's memory for some inputs, from the next run on.

        No output may have another shape by that.

        Raises:
            TensorError: the engine refuses the shape, dtype or device of one.
            StateError: a run is under way.
        """
        ...

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Begin a run; on the host, make it.

        Args:
            is_fed: begin it behind the one under way, whose greedy tokens are its input and never
                leave the device: the ids in `inputs` are not looked at. What fails is raised by
                `result`. On a device alone.

        Raises:
            BackendError, TensorError: the run failed, and is not fed.
            StateError: others are under way than the one it is fed of, or the engine was closed
                since.
        """
        ...

    def result(self) -> TopK:
        """Wait for the oldest run that is under way; its arrays change with the next but one.

        Raises:
            BackendError: the run failed; it is under way until `discard`.
            StateError: none is under way, or the engine was closed since.
        """
        ...

    def discard(self) -> None:
        """Wait for what is under way, and forget it with all that it failed of."""
        ...
