"""Quantise the linears of a float model: which, to what codes, and by what.

8 bits are rounded to the nearest, symmetric. 4 bits have zeros, in ranges of the least error; on a
text the error is that of `x @ W`, and GPTQ finds the codes. The output head is rounded without one.
A plan takes no zeros, and of 8 bits one scale a row; codes of FP8 are floats, and its products read
x as FP8, too, with one scale of what the text has.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from trt_lora.builder.config import QUANTIZED_BITS, BuildConfig
from trt_lora.builder.passes.codes.coded_weight import FLOAT8_MAX, CodedWeight
from trt_lora.builder.progress import Progress
from trt_lora.builder.quantising.gptq import gptq_codes
from trt_lora.builder.quantising.grid import (
    CodeFormat,
    Grid,
    nearest_float8,
    nearest_grid,
    searched_grid,
)
from trt_lora.builder.quantising.moments import Moments
from trt_lora.builder.quantising.streamed_weights import StreamedWeights
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.tokenizer import TOKENIZER_FILE, TextTokenizer
from trt_lora.runtime.weight_format import WeightFormat

TEXT = Path(__file__).with_name("calibration.txt")  # of this package's own documents
_WINDOW, _WINDOWS = 512, 32  # tokens; attention takes most of the time in longer ones


@dataclass(frozen=True)
class QuantisedLinear:
    """A weight in codes, and what made them."""

    weight: CodedWeight
    source: str
    scales_x: bool = False  # whether x is divided by factors that are in the weight

    def format(self, level: str, embedding: str) -> WeightFormat:
        """Return what the manifest says of it, of its products, and of a tied embedding."""
        weight = self.weight
        name, bits = "fp8" if weight.is_float else f"int{weight.bits}", weight.bits
        if weight.parts is not None:
            name, bits = "nvfp4", 4
        is_symmetric = weight.zeros is None
        sizes = weight.shape, bits, weight.block
        if weight.is_float:
            level = "exact" if weight.x_scale is None else "fast"
        has_scaled_x = self.scales_x and weight.factors is None
        return WeightFormat(name, *sizes, is_symmetric, self.source, level, embedding, has_scaled_x)


@dataclass(frozen=True)
class Quantiser:
    """Quantises the linears of one model."""

    weights: StreamedWeights  # of a model on the CPU
    config: BuildConfig
    has_plan: bool
    head: str  # path of the output head, which has bits of its own
    positions: int | None  # tokens that the model takes at a time; None: any number
    progress: Progress

    def quantised(self) -> dict[str, QuantisedLinear]:
        """Return the linears that are to be read as codes, by their modules' paths.

        Raises:
            ConfigError: the text cannot be read.
            ModelError: the model cannot be run on the text.
        """
        self.progress.stage("quantise")
        if self.has_plan and self.config.quantize == "int4":
            self.progress.note("a plan takes no zeros: with --flavour none 4 bits lose less")
        with torch.inference_mode():
            return dict(self._linears())

    def _linears(self) -> Iterator[tuple[str, QuantisedLinear]]:
        paths = dict.fromkeys(self._paths())
        if self.head in paths:
            del paths[self.head]
            if self.config.quantize_head != "none":
                yield self.head, self._nearest(self.head, self.config.quantize_head)
        if self.config.quantize == "int4" and (windows := self._windows()):
            for path, linear in self._calibrated(paths.keys(), windows):
                del paths[path]
                yield path, linear
        if self.config.quantize == "fp8":
            yield from self._float8(paths.keys())
            return
        # Without a text, and what the decoder does not run.
        for path in paths:
            yield path, self._nearest(path, self.config.quantize)

    def _float8(self, paths: Collection[str]) -> Iterator[tuple[str, QuantisedLinear]]:
        windows = self._windows() if self.config.quantize_level == "fast" else []
        largest, source = dict[str, float](), "rounded to the nearest"
        if windows:
            source += f", x on {_sha256(windows)}"
            moments = Moments(self.weights.model, windows)
            with self.weights.in_modules():
                largest = moments.largest(moments.inputs())
        for path in paths:
            weight = nearest_float8(self.weights[path], getattr(torch, self.config.dtype))
            if path in largest:
                scale = np.float32(largest[path] / FLOAT8_MAX)
                weight = replace(weight, x_scale=np.asarray(scale))
            yield path, QuantisedLinear(weight, source)

    def _form(self, name: str, k: int) -> CodeFormat:
        bits, dtype = QUANTIZED_BITS[name], getattr(torch, self.config.dtype)
        block = k if self.has_plan and bits == 8 else self.config.quantize_block
        return CodeFormat(bits, block, dtype, self.has_plan)

    def _paths(self) -> Iterator[str]:
        """The linears whose rows are whole blocks."""
        block = self.config.quantize_block
        for path, (_, k) in self.weights.shapes():
            if k % block:
                rows = f"rows of {k} values are no blocks of {block}"
                self.progress.note(f"{path} keeps its weight in {self.config.dtype}: {rows}")
            else:
                yield path

    def _windows(self) -> list[list[int]]:
        """The text as token ids; empty where the model has no tokenizer."""
        path, directory = self.config.calibration or TEXT, self.config.model
        if not (directory / TOKENIZER_FILE).is_file():
            self.progress.note(f"{directory} has no {TOKENIZER_FILE}: codes without calibration")
            return []
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
        if not text.strip():
            raise ConfigError(f"--calibration {path} holds no text; pass another, or leave it out")
        ids = TextTokenizer(directory).encode_text(text)
        size = min(_WINDOW, self.positions or _WINDOW)
        return [ids[i : i + size] for i in range(0, min(len(ids), _WINDOWS * _WINDOW), size)]

    def _calibrated(
        self, paths: Collection[str], windows: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, QuantisedLinear]]:
        source = f"GPTQ on {_sha256(windows)}"
        moments = Moments(self.weights.model, windows)
        with self.weights.in_modules():
            inputs = [item for item in moments.inputs() if set(item.paths).issubset(paths)]
            for done, (item, squares) in enumerate(moments.of(inputs)):
                self.progress.advance(done, len(inputs))
                weights = [self.weights[path] for path in item.paths]
                form = self._form(self.config.quantize, item.k)
                grid, codes = _by_moments(torch.cat(weights), form, squares)
                first = 0
                for path, weight in zip(item.paths, weights, strict=True):
                    last = first + len(weight)
                    coded = grid.rows(first, last).coded(codes[first:last])
                    yield path, QuantisedLinear(coded, source)
                    first = last

    def _nearest(self, path: str, name: str) -> QuantisedLinear:
        """Codes without a text: symmetric, or of 4 bits in the ranges of the least error."""
        weight = self.weights[path]
        k = weight.shape[1]
        form = self._form(name, k)
        if form.bits > 4:
            grid = nearest_grid(weight, form)
        else:
            grid = searched_grid(weight, form, torch.ones(k))
        coded = grid.coded(grid.codes(weight)).split(self.config.quantize_block)
        return QuantisedLinear(coded, "rounded to the nearest")


def _sha256(windows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr(windows).encode()).hexdigest()


def _by_moments(
    weight: torch.Tensor, form: CodeFormat, moments: torch.Tensor
) -> tuple[Grid, torch.Tensor]:
    """Grid and codes of a weight [n, k], by moments [k, k] or their diagonal [k]."""
    if moments.dim() == 1:
        grid = searched_grid(weight, form, moments)
        return grid, grid.codes(weight)
    grid = searched_grid(weight, form, moments.diagonal())
    return grid, gptq_codes(weight, grid, moments)
