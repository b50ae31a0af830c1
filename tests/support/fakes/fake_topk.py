"""A CUDA driver that finds candidates in the memory of a fake GPU, with numpy."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import GARBAGE, Work
from support.fakes.fake_driver import FakeDriver, Launched, Status

from trt_lora.plugins import cuda_bindings
from trt_lora.plugins.kernels import candidates, launcher
from trt_lora.plugins.kernels.candidates import KernelRows
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

_REAL = cuda_bindings.bindings
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class Capturing(Status):
    """The status of what is refused while a stream is captured."""

    name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"


class TopKDriver(FakeDriver):
    """Each launch is work on its stream, and reads the logits when its turn comes.

    The first kernel leaves zeros in the workspace, and the second wants them there.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        current, device_of = (lambda: cuda.current_device), cuda.device_of
        super().__init__(*[Chip((9, 0), 132)] * 2, current=current, device_of=device_of)
        self.cuda = cuda

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what the search for candidates finds, which remembers no other driver."""
        for module in (cuda_bindings, launcher):
            monkeypatch.setattr(module, "bindings", lambda n: self if n == "driver" else _REAL(n))
        monkeypatch.setattr(candidates, "compile_candidates", _ptx)
        launcher.chip_of.cache_clear()
        for module, name in ((candidates, "_functions"), (launcher, "_start_driver")):
            fresh = functools.cache(getattr(module, name).__wrapped__)
            monkeypatch.setattr(module, name, fresh)

    def cuLibraryLoadData(self, *args: Any) -> tuple[Any, ...]:
        """Load a library, unless this thread captures."""
        if self.cuda.invalidates_a_capture():
            return (Capturing(900),)
        loaded: tuple[Any, ...] = super().__getattr__("cuLibraryLoadData")(*args)
        return loaded

    def _cuLaunchKernel(self, kernel: int, *args: Any) -> tuple[()]:
        super()._cuLaunchKernel(kernel, *args)
        launched = self.launched[-1]
        rows = KernelRows.from_buffer_copy(launched.group)
        if launched.kernel == "best_of_rows":
            self._enqueue_rows(launched, rows)
        else:
            self._enqueue_parts(launched, rows)
        return ()

    def _enqueue_parts(self, launched: Launched, rows: KernelRows) -> None:
        self._dtype = launched.kernel.removeprefix("best_of_parts_")
        keys = self._workspace(rows, launched.grid[1])
        logits = self._logits(rows, launched.grid[1])
        self._enqueue(launched, [keys, logits], lambda: self.view(keys).fill(0))

    def _enqueue_rows(self, launched: Launched, rows: KernelRows) -> None:
        count, kept, dtype = launched.grid[0], candidates.KEPT, self._dtype
        places = {
            "logits": (self._logits(rows, count), dtype),
            "temperatures": ((rows.temperatures, count * 8), "float64"),
            "tokens": ((rows.tokens, count * kept * 4), "int32"),
            "values": ((rows.values, count * kept * 4), "float32"),
            "totals": ((rows.totals, count * 8), "float64"),
            "not_finite": ((rows.not_finite, count * 4), "int32"),
            "greedy": ((rows.greedy or 0, count * 8 if rows.greedy else 0), "int64"),
        }
        keys = self._workspace(rows, count)

        def run() -> None:
            assert not self.view(keys).any(), "the parts have not been searched"
            self.view(keys).fill(GARBAGE)
            views = {
                name: self.view(place).view(_dtype(kind)).reshape(count, -1)
                for name, (place, kind) in places.items()
                if place[1]
            }
            _find(views)

        self._enqueue(launched, [keys, *(place for place, _ in places.values())], run)

    def _enqueue(self, launched: Launched, places: list[tuple[int, int]], run: Any) -> None:
        what = f"kernel {launched.kernel}"
        blocks = [b for at, n in places for b in self.cuda.blocks_at(at, n, what)]
        self.cuda.enqueue(Work(what, launched.stream, blocks, run))

    def view(self, place: tuple[int, int]) -> Array:
        """The bytes of a place."""
        return self.cuda.view(*place)

    def _logits(self, rows: KernelRows, count: int) -> tuple[int, int]:
        return rows.logits, count * rows.vocabulary * _ITEM_BYTES[self._dtype]

    def _workspace(self, rows: KernelRows, count: int) -> tuple[int, int]:
        return rows.keys, count * rows.parts * (candidates.KEPT + 1) * 8


def _find(views: dict[str, Array]) -> None:
    logits = views["logits"].astype(np.float32)
    finite = np.isfinite(logits).all(axis=1)
    views["not_finite"][:, 0] = ~finite
    views["tokens"].fill(-1)
    views["values"].fill(-np.inf)
    for row in np.flatnonzero(finite):
        order = np.argsort(-logits[row], kind="stable")
        kept = order[: candidates.KEPT]
        views["tokens"][row, : kept.size] = kept
        views["values"][row, : kept.size] = logits[row, kept]
        below = logits[row].astype(np.float64) - float(logits[row].max())
        views["totals"][row] = np.exp(below / (views["temperatures"][row, 0] or 1)).sum()
    if "greedy" in views:
        views["greedy"][:] = np.maximum(views["tokens"][:, :1], 0)


def _dtype(kind: str) -> Any:
    return np.dtype(np.float64) if kind == "float64" else storage_dtype(kind)


def _ptx(arch: str, kernels: Sequence[str]) -> bytes:
    return "".join(f"{arch} .entry {kernel}()\n" for kernel in kernels).encode()
