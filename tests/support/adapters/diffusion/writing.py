"""Writes a diffusion adapter's file, and keeps what it says of every module: scale * B A."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.adapters.diffusion.models import Deltas

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")
OLD = ("lora.down.weight", "lora.up.weight")
BARE = ("down.weight", "up.weight")


class Writing:
    """A file that is being written, for an engine."""

    def __init__(self, manifest: Manifest) -> None:
        self.sites = {site.path: site for site in manifest.sites}
        self.tensors: dict[str, Array] = {}
        self.metadata: dict[str, str] = {}
        self.expected: Deltas = {}
        self._rng = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        """Draw other values from here on."""
        self._rng = np.random.default_rng(seed)

    def random(self, *shape: int, dtype: str = "float32") -> Array:
        return self._rng.standard_normal(shape).astype(dtype)

    def add(
        self,
        stem: str,
        *paths: str,
        ends: tuple[str, str] = KOHYA,
        rank: int = 2,
        alpha: Any = None,
        scale: float = 1.0,
        taps: tuple[int, ...] = (),
        dtype: str = "float32",
    ) -> None:
        """Factors of one module, which has the outputs of these paths in their order.

        Args:
            stem: its name in the file.
            paths: in the engine.
            ends: of the names of A and B.
            rank: of A and B.
            alpha: any number with a dtype; None: none.
            scale: where there is no alpha.
            taps: of a convolution's kernel.
            dtype: of A and B.
        """
        k, n = self.sites[paths[0]].k, sum(self.sites[path].n for path in paths)
        down, up = self.random(rank, k, dtype=dtype), self.random(n, rank, dtype=dtype)
        self.tensors[f"{stem}.{ends[0]}"] = _kernel(down, taps)
        self.tensors[f"{stem}.{ends[1]}"] = _kernel(up, (1,) * len(taps))
        if alpha is not None:
            self.tensors[f"{stem}.alpha"] = np.asarray(alpha)
            scale = float(alpha) / rank
        self.expect(paths, scale * up.astype(np.float64) @ down.astype(np.float64))

    def expect(self, paths: Sequence[str], delta: Array) -> None:
        """The delta [n, k] of a module with the outputs of these paths."""
        start = 0
        for path in paths:
            self.expected[path] = delta[start : start + self.sites[path].n].astype(np.float64)
            start += self.sites[path].n

    def swap(self, path: str) -> None:
        """The engine's module has its halves, scale and shift, the other way round."""
        self.expected[path] = np.concatenate(np.split(self.expected[path], 2)[::-1])

    def configure(self, **fields: Any) -> None:
        """Diffusers' metadata, which hold PEFT's config; dots in names are written as __."""
        named = {name.replace("__", "."): value for name, value in fields.items()}
        self.metadata["lora_adapter_metadata"] = json.dumps(named)

    def save(self, path: Path) -> Path:
        tensors = {name: np.asarray(tensor) for name, tensor in self.tensors.items()}
        save_file(tensors, path, self.metadata or None)
        return path


def _kernel(matrix: Array, taps: tuple[int, ...]) -> Array:
    rows, columns = matrix.shape
    return matrix.reshape(rows, columns // int(np.prod(taps)), *taps) if taps else matrix
