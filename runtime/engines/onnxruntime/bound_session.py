"""ONNX Runtime session with an IOBinding that re-binds only what changed."""

from typing import Any

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap


class BoundSession:
    """Runs of one session, one at a time; a run that failed leaves it unusable.

    What a run binds stays bound, and most of it is the same in the next: 420 LoRA inputs handed
    over anew cost a token a tenth of its time. An output in place of an input stays bound to that
    input's memory.
    """

    def __init__(self, session: Any, manifest: Manifest) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._new = [output for output in manifest.outputs if not output.in_place_of]
        self._in_place = {o.in_place_of: o.name for o in manifest.outputs if o.in_place_of}
        self._dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
        self._bound: dict[str, Tensor] = {}
        self._outputs: dict[str, None] = {}  # names in the order of first binding, ONNX Runtime's

    def run(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Bind what differs from the run before, run, and return every output.

        Raises:
            TensorError: an input has a shape, dtype or device that the graph refuses.
        """
        for name in self._dtypes:
            self._bind(name, tensor_map[name])
        for output in self._new:
            self._binding.bind_output(output.name)  # allocated by the run, at the size it needs
            self._outputs.setdefault(output.name)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its exceptions have no common base of their own
            raise TensorError(f"ONNX Runtime refuses these inputs: {error}") from error
        return self._take_outputs() | {
            output: tensor_map[name] for name, output in self._in_place.items()
        }

    def _take_outputs(self) -> dict[str, Tensor]:
        values = dict(zip(self._outputs, self._binding.get_outputs(), strict=True))
        if not self._in_place:
            self._binding.clear_binding_outputs()  # whoever asked owns them
            self._outputs.clear()
        return {output.name: _tensor(output, values[output.name]) for output in self._new}

    def _bind(self, name: str, tensor: Tensor) -> None:
        if self._bound.get(name) is tensor:
            return
        value = self._make_value(name, tensor)
        self._binding.bind_ortvalue_input(name, value)
        if output := self._in_place.get(name):
            self._binding.bind_ortvalue_output(output, value)
            self._outputs.setdefault(output)
        self._bound[name] = tensor  # keeps its memory alive as long as it is bound

    def _make_value(self, name: str, tensor: Tensor) -> Any:
        """The OrtValue over a tensor's memory; an output of an earlier run is one already."""
        import onnxruntime

        if tensor.dtype != self._dtypes[name] or tensor.device != HOST:
            raise TensorError(
                f"{name} is {tensor.dtype} on {tensor.device}; "
                f"this engine takes {self._dtypes[name]} on {HOST}"
            )
        owner: Any = tensor.owner
        if isinstance(owner, onnxruntime.OrtValue) and tuple(owner.shape()) == tensor.shape:
            return owner
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.storage())


def _tensor(binding: Binding, value: Any) -> Tensor:
    shape = tuple(int(size) for size in value.shape())
    return Tensor(value.data_ptr(), shape, binding.dtype, HOST, owner=value)
