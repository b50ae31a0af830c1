"""Builds that trace a model once, for tests of what comes after the trace."""

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch
from filelock import FileLock
from onnx import ModelProto
from onnx_ir.tensor_adapters import TorchTensor
from support.build_cache import build_cache

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.export.causal_lm import Exported, export_causal_lm
from trt_lora.builder.export.weight_views import weight_of
from trt_lora.builder.progress import Progress
from trt_lora.runtime import Manifest


def quick_build(config: BuildConfig, progress: Progress | None = None) -> Manifest:
    """Do as `build_engine` does, which see; a second build of a model takes a tenth of a second."""
    with shared_traces():
        return build_engine(config, progress)


@contextmanager
def shared_traces() -> Iterator[None]:
    """Let every build in here take the graph of an earlier one of the same model, if there is any.

    It is the real graph: a trace depends on the sources, the tools, the model's config, its dtype,
    the length of its cache, and the values of all but the weights that have rows and columns.
    """
    with patch("trt_lora.builder.write_engine.export_causal_lm", _TRACES.export):
        yield


class _Traces:
    """What has been traced, by all that a trace depends on; weights of linears are in none."""

    def __init__(self) -> None:
        self._found: dict[str, Exported] = {}

    def export(self, model: Any, max_len: int) -> Exported:
        """Return a copy of the graph, as `export_causal_lm` does; the passes change it in place."""
        key = f"{_digest(model)}-{max_len}"
        if key not in self._found:
            self._found[key] = _shared(key, model, max_len)
        found = self._found[key]
        return replace(found, model=_with_weights(found.model.clone(), model))


def _shared(key: str, model: Any, max_len: int) -> Exported:
    """Trace a model, or read what another process has traced."""
    file = build_cache("traces") / key
    with FileLock(f"{file}.lock"):
        if not file.exists():
            exported = export_causal_lm(model, max_len)
            graph = ir.to_proto(_without_weights(exported.model, model)).SerializeToString()
            part = file.with_suffix(".part")
            part.write_bytes(pickle.dumps((graph, dict(exported.linears))))
            part.replace(file)
    graph, linears = pickle.loads(file.read_bytes())
    return Exported(ir.from_proto(ModelProto.FromString(graph)), linears)


def _without_weights(graph: ir.Model, model: Any) -> ir.Model:
    """Empty a graph of weights that are the memory of the model; no trace depends on them."""
    for value, own in _weights(graph, model):
        found = weight_of(value)
        assert found is not None
        assert found.shape == own.shape
        assert torch.equal(found, own)
        value.const_value = TorchTensor(own.new_empty(0), value.name)
    return graph


def _with_weights(graph: ir.Model, model: Any) -> ir.Model:
    """Let a graph have the weights of a model itself, as a trace does."""
    for value, own in _weights(graph, model):
        value.const_value = TorchTensor(own, value.name)
        value.shape = ir.Shape(own.shape)
    return graph


def _weights(graph: ir.Model, model: Any) -> Iterator[tuple[ir.Value, torch.Tensor]]:
    """The initializers that are weights of rows and columns, with what the model has for each."""
    own = {name: weight for name, weight in model.state_dict().items() if weight.dim() == 2}
    for name, value in graph.graph.initializers.items():
        path = name.removeprefix("model_.").removesuffix(".transposed")
        if path in own:
            yield value, own[path].T if name.endswith(".transposed") else own[path]


def _digest(model: Any) -> str:
    """What a trace depends on: shapes, which weights are one, and the values of small ones."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.config.to_json_string()}".encode())
    owners = dict[int, str]()
    for name, weight in model.state_dict().items():
        owner = owners.setdefault(weight.data_ptr(), name)
        digest.update(f"{name} {owner} {weight.dtype} {list(weight.shape)}".encode())
        if weight.dim() != 2:
            digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


_TRACES = _Traces()
