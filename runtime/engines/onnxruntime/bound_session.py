"""ONNX Runtime session with an IOBinding that re-binds only what changed."""

from collections.abc import Collection, Iterable
from itertools import compress
from operator import is_not
from typing import Any

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, ZeroMemory


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
        optional = {value.name for value in session.get_overridable_initializers()}
        self._dummies = SkippedDummies(manifest, optional)
        self._given: set[str] = set()  # inputs that are bound
        # Of the last run. The same objects are told without a look at them: a step has just driven
        # a thousand strings and tensors out of the processor's caches.
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._written: dict[str, Tensor] = {}  # outputs in place of an input
        self._places: dict[str, int] = {}  # of outputs, in the order of first binding
        self.outputs: dict[str, Tensor] = {}  # of `replay`, but those in place of an input

    def run(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Bind what differs from the run before, run, and return every output.

        Raises:
            TensorError: an input has a shape, dtype or device that the graph refuses.
        """
        self.bind(self._changed(tensor_map), tensor_map)
        self._run_into_new_outputs()
        return self._outputs() | self._written

    def replay(self) -> None:
        """Run what is bound; `outputs` are those of the last run, in the memory of the first.

        Raises:
            TensorError: an input has a shape that the graph refuses, or that makes an output of
                another shape.
        """
        if self.outputs:
            self._run()
        else:
            self._run_into_new_outputs()
            self.outputs = self._outputs()

    def _run_into_new_outputs(self) -> None:
        for output in self._new:
            self._binding.bind_output(output.name)  # allocated by the run, at the size it needs
            self._places.setdefault(output.name, len(self._places))
        self._run()

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its exceptions have no common base of their own
            raise TensorError(f"ONNX Runtime refuses these inputs: {error}") from error

    def _changed(self, tensor_map: TensorMap) -> list[str]:
        """Inputs that the run before had other tensors for."""
        names, tensors = list(tensor_map), list(tensor_map.values())
        last = self._names
        if last and len(names) == len(last) and not any(map(is_not, names, last)):
            changed = list(compress(names, map(is_not, tensors, self._tensors)))
        else:
            check_inputs(tensor_map, self._dtypes)
            changed = list(self._dtypes)
        self._names, self._tensors = names, tensors
        return [name for name in changed if name in self._dtypes]

    def bind(self, changed: Collection[str], tensor_map: TensorMap) -> None:
        """Bind inputs of a map that holds all.

        Raises:
            TensorError: one has a dtype or device that the graph refuses.
        """
        for name in changed:
            if not isinstance(tensor_map[name], Tensor):
                raise TensorError(
                    f"{name} is a {type(tensor_map[name]).__name__}, expected a Tensor; see "
                    "trt_lora.runtime.memory.interop.tensor_from"
                )
        changed = self._dummies.with_partners(changed)
        skipped = {name for name in changed if self._dummies.skips(name, tensor_map)}
        if skipped & self._given:  # an IOBinding lets go of all inputs or of none
            self._binding.clear_binding_inputs()
            self._given.clear()
            changed = self._dtypes
            skipped = {name for name in changed if self._dummies.skips(name, tensor_map)}
        for name in changed:
            if name not in skipped:
                self._bind(name, tensor_map[name])

    def _outputs(self) -> dict[str, Tensor]:
        import onnxruntime

        values = self._binding.get_outputs_as_ortvaluevector()
        return {
            output.name: _tensor(output, onnxruntime.OrtValue(values[self._places[output.name]]))
            for output in self._new
        }

    def _bind(self, name: str, tensor: Tensor) -> None:
        value = self._make_value(name, tensor)
        self._binding.bind_ortvalue_input(name, value)
        self._given.add(name)
        if output := self._in_place.get(name):
            self._binding.bind_ortvalue_output(output, value)
            self._places.setdefault(output, len(self._places))
            self._written[output] = tensor

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


class SkippedDummies:
    """Pairs of LoRA inputs whose products ONNX Runtime skips where there is no adapter.

    Whoever binds a dummy sees rank 1. ONNX Runtime is given nothing in its place where its graph
    has a default for the input, of rank 0: a product of nothing is the same zero.
    """

    def __init__(self, manifest: Manifest, optional: Collection[str]) -> None:
        """Pair A and B of every site.

        Args:
            manifest: of the engine.
            optional: inputs that have a default.
        """
        self._partners: dict[str, str] = {}
        for site in manifest.sites:
            a, b = manifest.binding_names.pair(site.path)
            if a in optional and b in optional:
                self._partners |= {a: b, b: a}

    def with_partners(self, names: Iterable[str]) -> Collection[str]:
        """Return inputs and their partners, each once: a pair is skipped or bound together."""
        changed = dict.fromkeys(names)
        return changed | {self._partners[name]: None for name in changed if name in self._partners}

    def skips(self, name: str, tensor_map: TensorMap) -> bool:
        """Whether an input and its partner are dummies."""
        if name not in self._partners:
            return False
        pair = tensor_map[name], tensor_map[self._partners[name]]
        return all(isinstance(tensor.owner, ZeroMemory) for tensor in pair)


def _tensor(binding: Binding, value: Any) -> Tensor:
    shape = tuple(int(size) for size in value.shape())
    return Tensor(value.data_ptr(), shape, binding.dtype, HOST, owner=value)
