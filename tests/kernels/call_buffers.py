"""The buffers of one call of the kernels, each between guards."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kernels.calls import Call
from kernels.guarded_buffer import Guarded, Memory

from trt_lora.plugins.kernels.group_call import GroupBuffers
from trt_lora.plugins.kernels.launch_plan import workspace_bytes
from trt_lora.runtime.memory.dtypes import Array


class CallBuffers:
    """Inputs as the call has them, outputs and workspace poisoned; a context that frees them."""

    def __init__(self, call: Call, memory: Memory, *, shift: int = 0) -> None:
        """Place everything, each buffer `shift` bytes off its alignment."""
        self._call = call

        def place(array: Array) -> Guarded:
            return Guarded(memory, array.nbytes, array, shift)

        inputs = call.inputs
        self._x = place(inputs.x)
        self._a, self._b, self._y = (
            [place(array) for array in arrays] for arrays in (inputs.a, inputs.b, inputs.y)
        )
        self._rows = [Guarded(memory, array.nbytes, array) for array in inputs.rows]
        row_bytes = call.shape.m * inputs.x.itemsize
        self._out = [Guarded(memory, row_bytes * site.n, shift=shift) for site in call.shape.sites]
        self._workspace = Guarded(memory, workspace_bytes(call.shape))

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free everything."""
        for each in self.all():
            each.free()

    def run(self, launch: Callable[[GroupBuffers], None]) -> list[Array]:
        """Poison, launch, and return the outputs [m, n] as stored.

        Raises:
            AssertionError: a guard or an input has changed.
        """
        for each in (*self._out, self._workspace):
            each.reset()
        launch(self._addresses())
        damaged = [index for index, each in enumerate(self.all()) if not each.is_intact()]
        assert not damaged, f"memory that is no output was written, at buffers {damaged}"
        x = self._call.inputs.x
        return [out.read().view(x.dtype).reshape(len(x), -1) for out in self._out]

    def all(self) -> list[Guarded]:
        """Return x, A, B and y of each site, the rows' slots, then outputs and workspace."""
        inputs = [self._x, *self._a, *self._b, *self._y, *self._rows]
        return [*inputs, *self._out, self._workspace]

    def _addresses(self) -> GroupBuffers:
        a, b, y, out = map(_addresses, (self._a, self._b, self._y, self._out))
        rows = _addresses(self._rows)
        return GroupBuffers(self._x.address, a, b, y, out, self._workspace.address, *rows)


def _addresses(buffers: Sequence[Guarded]) -> tuple[int, ...]:
    return tuple(each.address for each in buffers)
