"""Timing of LoRA methods on one captured step, and a check that their results agree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.layers.decoder_layers import DecoderLayers, Lora
from trt_lora.scripts.bench.gpu.report import ResultRow
from trt_lora.scripts.bench.gpu.session import Bench, difference
from trt_lora.scripts.measuring.turns import Spread, Times

_BASES = ("base", "merged")  # without LoRA: what overheads are over, and the same once more


class MethodTiming:
    """The methods of one row; each is compared with `base`, and its results with a reference."""

    def __init__(self, bench: Bench, chain: DecoderLayers) -> None:
        """Start without methods."""
        self._bench, self._chain = bench, chain
        self._replays: dict[str, Replay] = {}
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._kept: list[Lora] = []  # the graphs read their buffers
        self._left_out: dict[str, str] = {}

    def add(self, name: str, lora: Lora) -> None:
        """Capture a method and keep what it computes; `base` and `merged` add no LoRA."""
        outputs = self._chain.run(lora)
        self._bench.device.synchronize()
        self._outputs[name] = [output.clone() for output in outputs]
        self._replays[name] = self._bench.device.capture(lambda: self._chain.run(lora))
        self._kept.append(lora)

    def attempt(self, name: str, make: Callable[[], Lora]) -> None:
        """Add a peer's method; whatever is wrong with it costs its own column alone."""
        try:
            self.add(name, make())
        except Exception as error:  # Triton, PEFT and vLLM raise what they like
            self._left_out[name] = f"left out: {error!r:.500}"

    def row(
        self,
        name: str,
        sizes: Mapping[str, Any],
        *,
        reference: str,
        notes: Mapping[str, Any] | None = None,
    ) -> ResultRow:
        """Time all methods.

        Args:
            name: what the row is called.
            sizes: of the step; `layers` among them.
            reference: the method that the others' results are compared with.
            notes: what else is to be written down.
        """
        times = self._bench.time(self._replays)
        layers = sizes["layers"]
        nodes = {
            method: None if replay.nodes is None else round(replay.nodes / layers, 2)
            for method, replay in self._replays.items()
        }
        return ResultRow(
            name,
            sizes,
            {f"{method}, us": times.median(method) for method in self._replays},
            self._ratios(times) | self._differences(reference),
            {"nodes a layer": nodes, **self._left_out, **(notes or {})},
        )

    @property
    def _methods(self) -> list[str]:
        return [name for name in self._replays if name not in _BASES]

    def _ratios(self, times: Times) -> dict[str, Spread | float]:
        ratios: dict[str, Spread | float] = {
            f"{name} overhead, %": times.overhead_percent(name, "base") for name in self._methods
        }
        if "merged" in self._replays:  # the same kernels twice: what is not told apart
            ratios["merged / base"] = times.ratio("merged", "base")
        if "ours" in self._replays:
            others = [name for name in self._methods if not name.startswith("ours")]
            ratios |= {f"{name} / ours": times.ratio(name, "ours") for name in others}
            ratios |= self._overheads_by_ours(times, others)
        return ratios

    def _overheads_by_ours(self, times: Times, others: Sequence[str]) -> dict[str, Spread | float]:
        """Overheads of the other methods in multiples of ours, by microseconds."""

        def added(name: str) -> float:
            return times.median(name) - times.median("base")

        ours = added("ours")
        if ours <= 0:
            return {}
        return {f"{name} overhead / ours overhead": added(name) / ours for name in others}

    def _differences(self, reference: str) -> dict[str, Spread | float]:
        """||method - reference|| / ||reference|| of every method that adds LoRA."""
        expected = self._outputs[reference]
        return {
            f"{name} / {reference}, difference": difference(self._outputs[name], expected)
            for name in self._methods
            if name != reference
        }
