"""Places of a search for candidates in device memory, and what it leaves as arrays."""

from collections.abc import Mapping

import numpy as np

from trt_lora.plugins.kernels import candidates
from trt_lora.plugins.kernels.candidates import CandidateBuffers, LogitsShape
from trt_lora.runtime.engines.ranked_run import TEMPERATURES, RankedRows
from trt_lora.runtime.engines.tensorrt.output_shapes import TensorShape
from trt_lora.runtime.engines.tensorrt.run_key import Ranking
from trt_lora.runtime.memory.tensor import Tensor

TOKENS, VALUES = "candidates.tokens", "candidates.values"
TOTALS, FLAGS = "candidates.totals", "candidates.not_finite"
_WORKSPACE = "candidates.workspace"


def candidate_shapes(rows: int) -> list[TensorShape]:
    """Return what a search leaves; the totals are the bits of float64."""
    listed = (rows, candidates.KEPT)
    return [
        (TOKENS, "int32", listed),
        (VALUES, "float32", listed),
        (TOTALS, "int64", (rows,)),
        (FLAGS, "int32", (rows,)),
    ]


def workspace_shape(logits: Tensor) -> TensorShape:
    """Return what a search needs beside."""
    return _WORKSPACE, "bool", (candidates.candidates_workspace_bytes(_shape(logits)),)


def ranking_of(logits: Tensor, places: Mapping[str, Tensor], *, greedy: int = 0) -> Ranking:
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
    return Ranking(_shape(logits), buffers)


def ranked_rows(found: Mapping[str, Tensor], logits: Tensor) -> RankedRows:
    """Return what a search left: in place where it is on the host, otherwise a copy."""
    tokens, values, totals, flags = (found[n].numpy() for n in (TOKENS, VALUES, TOTALS, FLAGS))
    return RankedRows(tokens, values, totals.view(np.float64), flags, _rows_of(logits))


def _rows_of(logits: Tensor) -> tuple[Tensor, ...]:
    rows, vocabulary = logits.shape
    step = logits.nbytes // rows
    return tuple(
        Tensor(logits.pointer + row * step, (vocabulary,), logits.dtype, logits.device, logits)
        for row in range(rows)
    )


def _shape(logits: Tensor) -> LogitsShape:
    rows, vocabulary = logits.shape
    return LogitsShape(rows, vocabulary, logits.dtype)
