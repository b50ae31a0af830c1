"""Builds that trace a model once, for tests of what comes after the trace."""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import torch
from filelock import FileLock
from onnx import ModelProto
from onnx_ir.tensor_adapters import TorchTensor
from support.build_cache import build_cache

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.export.causal_lm import Exported, export_causal_lm
from trt_lora.builder.progress import Progress
from trt_lora.runtime import Manifest

_SMALL = 1 << 24  # bytes of weights; a graph with more of them is kept in this process alone


def quick_build(config: BuildConfig, progress: Progress | None = None) -> Manifest:
    """Do as `build_engine` does, which see; a second build of a model takes a tenth of a second."""
    with shared_traces():
        return build_engine(config, progress)


@contextmanager
def shared_traces() -> Iterator[None]:
    """Let every build in here take the graph of an earlier one of the same model, if there is any.

    It is the real graph: a trace depends on the sources, the tools, the model, its dtype, and the
    length of its cache, which all have to be equal, down to the bits of the weights.
    """
    with patch("trt_lora.builder.write_engine.export_causal_lm", _TRACES.export):
        yield


class _Traces:
    """What has been traced, by all that a trace depends on."""

    def __init__(self) -> None:
        self._found: dict[str, Exported] = {}

    def export(self, model: Any, max_len: int) -> Exported:
        """Return a copy of the graph, as `export_causal_lm` does; the passes change it in place."""
        key = f"{_digest(model)}-{max_len}"
        if key not in self._found:
            self._found[key] = _shared(key, model, max_len)
        found = self._found[key]
        return replace(found, model=_with_memory_of(model, found.model.clone()))


def _with_memory_of(model: Any, graph: ir.Model) -> ir.Model:
    """Let a graph have the weights of a model itself, as a trace does, instead of equal ones."""
    weights = model.state_dict()
    for name, value in graph.graph.initializers.items():
        path = name.removeprefix("model_.").removesuffix(".transposed")
        if (weight := weights.get(path)) is not None:
            own = weight.T if name.endswith(".transposed") else weight
            assert np.array_equal(value.const_value.numpy(), own.float().numpy())  # type: ignore[union-attr]
            value.const_value = TorchTensor(own, name)
    return graph


def _shared(key: str, model: Any, max_len: int) -> Exported:
    """Trace a model, or read what another process has traced."""
    if sum(weight.nbytes for weight in model.state_dict().values()) > _SMALL:
        return export_causal_lm(model, max_len)
    file = build_cache("traces") / key
    with FileLock(f"{file}.lock"):
        if file.exists():
            return _read(file)
        exported = export_causal_lm(model, max_len)
        graph = ir.to_proto(exported.model).SerializeToString()
        part = file.with_suffix(".part")
        part.write_bytes(pickle.dumps((graph, dict(exported.linears))))
        part.replace(file)
        return exported


def _read(file: Path) -> Exported:
    graph, linears = pickle.loads(file.read_bytes())
    return Exported(ir.from_proto(ModelProto.FromString(graph)), linears)


def _digest(model: Any) -> str:
    digest = hashlib.sha256(f"{type(model).__name__} {model.config.to_json_string()}".encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


_TRACES = _Traces()
