"""Second moments and largest magnitudes of what each linear reads, on windows of a text.

Linears that read one tensor, such as q, k and v, share its moments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trt_lora.builder.export.torch_modules import module_linears
from trt_lora.builder.model_errors import one_line

_PASS_BYTES = 4 << 30  # of moments in memory
_WIDEST = 8192  # x of more values has the diagonal alone


@dataclass(frozen=True)
class SharedInput:
    """A tensor [.., k] that linears read, and their paths in the order in which they run."""

    k: int
    paths: list[str]

    @property
    def is_wide(self) -> bool:
        """Whether moments are too many to keep all."""
        return self.k > _WIDEST

    @property
    def nbytes(self) -> int:
        """Size of the moments."""
        return 4 * self.k * (1 if self.is_wide else self.k)


@dataclass(frozen=True)
class Moments:
    """Runs the decoder of a model on windows of token ids, as often as memory asks for."""

    model: Any  # a `PreTrainedModel` in float32
    windows: Sequence[Sequence[int]]

    def inputs(self) -> list[SharedInput]:
        """Return what the linears of the decoder read."""
        found: dict[int, SharedInput] = {}
        kept: dict[str, torch.Tensor] = {}  # so that an id stays that of one tensor

        def see(path: str, x: torch.Tensor) -> None:
            if path not in kept:  # else it is called again: its inputs count together
                kept[path] = x
                found.setdefault(id(x), SharedInput(x.shape[-1], [])).paths.append(path)

        paths = [path for path, _ in module_linears(self.model)]
        self._run(paths, [self.windows[0][:2]], see)
        return list(found.values())

    def of(self, inputs: Sequence[SharedInput]) -> Iterator[tuple[SharedInput, torch.Tensor]]:
        """Yield each input with its moments: float32 [k, k], or [k] of one that is wide."""
        waiting = list(inputs)
        while waiting:
            now = [waiting.pop(0)]
            while waiting and sum(x.nbytes for x in (*now, waiting[0])) <= _PASS_BYTES:
                now.append(waiting.pop(0))
            measured = self._measured(now)
            for x in now:  # which takes a part of the memory each
                yield x, measured.pop(x.paths[0])

    def largest(self, inputs: Sequence[SharedInput]) -> dict[str, float]:
        """Return the largest magnitude of each input, by the paths of all linears that read it."""
        found = {x.paths[0]: 0.0 for x in inputs}

        def see(path: str, x: torch.Tensor) -> None:
            found[path] = max(found[path], float(x.abs().max()))

        self._run(list(found), self.windows, see)
        return {path: found[x.paths[0]] for x in inputs for path in x.paths}

    def _measured(self, inputs: Sequence[SharedInput]) -> dict[str, torch.Tensor]:
        sums = {x.paths[0]: np.zeros((x.k,) * (1 if x.is_wide else 2), np.float32) for x in inputs}

        def add(path: str, x: torch.Tensor) -> None:
            rows, total = x.reshape(-1, x.shape[-1]).numpy(), sums[path]
            # Of x.T @ x numpy computes one half.
            total += np.square(rows).sum(0) if total.ndim == 1 else rows.T @ rows

        self._run(list(sums), self.windows, add)
        tokens = sum(map(len, self.windows))
        for total in sums.values():
            np.divide(total, np.float32(tokens), out=total)
        return {path: torch.from_numpy(total) for path, total in sums.items()}

    def _run(
        self,
        paths: Sequence[str],
        windows: Sequence[Sequence[int]],
        see: Callable[[str, torch.Tensor], None],
    ) -> None:
        """Show `see` what some linears read, window by window."""
        modules, decoder = dict(module_linears(self.model)), self.model.get_decoder()
        hooks = [
            modules[path].register_forward_pre_hook(lambda _, args, path=path: see(path, args[0]))
            for path in paths
        ]
        failure = "the model cannot be run on a text"
        try:
            with torch.inference_mode(), one_line(failure, "pass --quantize int8"):
                for window in windows:
                    decoder(input_ids=torch.tensor([list(window)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
