"""Builds that trace a model once in a process, for tests of what comes after the trace."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.export.causal_lm import Exported, export_causal_lm
from trt_lora.builder.progress import Progress
from trt_lora.runtime import Manifest


def quick_build(config: BuildConfig, progress: Progress | None = None) -> Manifest:
    """Do as `build_engine` does, which see; a second build of a model takes a tenth of a second."""
    with shared_traces():
        return build_engine(config, progress)


@contextmanager
def shared_traces() -> Iterator[None]:
    """Let every build in here take the graph of an earlier one of the same model, if there is any.

    It is the real graph: a trace depends on the model, its dtype, and the form and length of its
    cache, which all have to be equal, down to the bits of the weights.
    """
    with patch("trt_lora.builder.write_engine.export_causal_lm", _TRACES.export):
        yield


class _Traces:
    """What has been traced in this process, by all that a trace depends on."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Exported] = {}

    def export(self, model: Any, max_len: int) -> Exported:
        """Return a copy of the graph, as `export_causal_lm` does; the passes change it in place."""
        key = _digest(model), max_len
        if key not in self._found:
            self._found[key] = export_causal_lm(model, max_len)
        found = self._found[key]
        return replace(found, model=found.model.clone())


def _digest(model: Any) -> str:
    digest = hashlib.sha256(f"{type(model).__name__} {model.config.to_json_string()}".encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


_TRACES = _Traces()
