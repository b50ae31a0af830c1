"""The search for the best tokens on the device: its places in memory, and what it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.kernels import candidates
from trt_lora.plugins.kernels.candidates import CandidateBuffers, LogitsShape
from trt_lora.runtime.engines.tensorrt.run_key import TopKSearch
from trt_lora.runtime.engines.topk import (
    TEMPERATURES,
    Candidates,
    Floats,
    Logits,
    Mask,
    Temperatures,
    Tokens,
    index_of,
)
from trt_lora.runtime.memory.tensor import Tensor

TOKENS, VALUES = "candidates.tokens", "candidates.values"
TOTALS, FLAGS = "candidates.totals", "candidates.not_finite"
_WORKSPACE = "candidates.workspace"


@dataclass(frozen=True)
class DeviceTopK:
    """A `TopK` of logits on the device, whose best tokens are on the host; see there."""

    found: Candidates  # at these temperatures; token -1 behind the last of a small vocabulary
    flags: npt.NDArray[np.int32]  # [rows], other than 0 where a logit is not finite
    temperatures: Floats  # [rows], 0 is greedy
    device_logits: Tensor  # [all rows, vocab], until the next run
    places: Sequence[int]  # of the rows among all

    @property
    def vocabulary(self) -> int:
        """See `TopK`."""
        return self.found.vocabulary

    def __len__(self) -> int:
        """See `TopK`."""
        return len(self.flags)

    def is_finite(self) -> Mask:
        """See `TopK`."""
        return np.asarray(self.flags == 0, np.bool_)

    def first(self) -> Tokens:
        """See `TopK`."""
        return self.found.tokens[:, 0].astype(np.int64)

    def candidates(self, rows: Sequence[int], count: int, temperatures: Temperatures) -> Candidates:
        """See `TopK`; totals are NaN at other temperatures than those of the run."""
        del count
        found, known = self.found.select(rows), self.temperatures[index_of(rows)]
        asked = np.array([np.nan if t is None else t or 1 for t in temperatures])
        is_known = asked == np.where(known == 0, 1, known)
        return replace(found, totals=np.where(is_known, found.totals, np.nan))

    def logits(self, rows: Sequence[int]) -> list[Logits]:
        """See `TopK`."""
        copies = [_row_of(self.device_logits, self.places[row]).numpy() for row in rows]
        return [copy.astype(np.float32, copy=False) for copy in copies]

    def select(self, rows: Sequence[int]) -> "DeviceTopK":
        """See `TopK`."""
        at = index_of(rows)
        return replace(
            self,
            found=self.found.select(rows),
            flags=self.flags[at],
            temperatures=self.temperatures[at],
            places=[self.places[row] for row in rows],
        )


def candidate_outputs(rows: int) -> dict[str, Tensor]:
    """Return what a search leaves, still without addresses; the totals are the bits of float64."""
    listed = (rows, candidates.KEPT)
    return {
        TOKENS: Tensor(0, listed, "int32"),
        VALUES: Tensor(0, listed, "float32"),
        TOTALS: Tensor(0, (rows,), "int64"),
        FLAGS: Tensor(0, (rows,), "int32"),
    }


def candidate_workspace(logits: Tensor) -> dict[str, Tensor]:
    """Return what a search needs beside, still without an address."""
    nbytes = candidates.candidates_workspace_bytes(_shape(logits))
    return {_WORKSPACE: Tensor(0, (nbytes,), "bool")}


def search_of(logits: Tensor, places: Mapping[str, Tensor], *, greedy: int = 0) -> TopKSearch:
    """Return the search.

    Args:
        logits: [rows, vocab].
        places: the temperatures, what it leaves and what it needs, on the same device.
        greedy: where each row's first token goes too; 0 is nowhere.
    """
    buffers = CandidateBuffers(
        logits.pointer,
        temperatures=places[TEMPERATURES].pointer,
        tokens=places[TOKENS].pointer,
        values=places[VALUES].pointer,
        totals=places[TOTALS].pointer,
        not_finite=places[FLAGS].pointer,
        workspace=places[_WORKSPACE].pointer,
        greedy=greedy,
    )
    return TopKSearch(_shape(logits), buffers)


def found_on_device(
    found: Mapping[str, Tensor], temperatures: Floats, logits: Tensor
) -> "DeviceTopK":
    """Return what a search left: in place where it is on the host, otherwise a copy."""
    tokens, values, totals, flags = (found[n].numpy() for n in (TOKENS, VALUES, TOTALS, FLAGS))
    best = Candidates(tokens, values, totals.view(np.float64), logits.shape[1])
    return DeviceTopK(best, flags, temperatures, logits, range(len(tokens)))


def _shape(logits: Tensor) -> LogitsShape:
    rows, vocabulary = logits.shape
    return LogitsShape(rows, vocabulary, logits.dtype)


def _row_of(logits: Tensor, row: int) -> Tensor:
    step = logits.nbytes // logits.shape[0]
    pointer, shape = logits.pointer + row * step, logits.shape[1:]
    return Tensor(pointer, shape, logits.dtype, logits.device, logits)
