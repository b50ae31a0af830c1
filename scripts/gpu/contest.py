"""Versions of one step, captured and timed against each other, and whether they agree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trt_lora.scripts.gpu.bench import Bench, difference
from trt_lora.scripts.gpu.chain import Chain, Lora
from trt_lora.scripts.gpu.device import Replay
from trt_lora.scripts.gpu.results import Row
from trt_lora.scripts.gpu.timing import Spread, Times


class Contest:
    """The versions of one row; each is compared with a base, and its results with a reference."""

    def __init__(self, bench: Bench, chain: Chain) -> None:
        """Start without versions."""
        self._bench, self._chain = bench, chain
        self._replays: dict[str, Replay] = {}
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._bases: dict[str, str] = {}
        self._kept: list[Lora] = []  # the graphs read their buffers
        self._left_out: dict[str, str] = {}

    def add(self, name: str, lora: Lora, base: str = "") -> None:
        """Capture a version and keep what it computes; `base` is what it adds LoRA to."""
        outputs = self._chain.run(lora)
        self._bench.device.synchronize()
        self._outputs[name] = [output.clone() for output in outputs]
        self._replays[name] = self._bench.device.capture(lambda: self._chain.run(lora))
        self._kept.append(lora)
        if base:
            self._bases[name] = base

    def attempt(self, name: str, make: Callable[[], Lora], base: str) -> None:
        """Add a peer's version; whatever is wrong with it costs its own column alone."""
        try:
            self.add(name, make(), base)
        except Exception as error:  # Triton, PEFT and vLLM raise what they like
            self._left_out[name] = f"left out: {error!r:.500}"

    def row(
        self,
        name: str,
        sizes: Mapping[str, Any],
        *,
        reference: str,
        notes: Mapping[str, Any] | None = None,
    ) -> Row:
        """Time all versions.

        Args:
            name: what the row is called.
            sizes: of the step; `layers` among them.
            reference: the version that the others' results are compared with.
            notes: what else is to be written down.
        """
        times = self._bench.time(self._replays)
        layers = sizes["layers"]
        nodes = {
            version: None if replay.nodes is None else round(replay.nodes / layers, 2)
            for version, replay in self._replays.items()
        }
        return Row(
            name,
            sizes,
            {f"{version}, us": times.median(version) for version in self._replays},
            self._ratios(times) | self._differences(reference),
            {"nodes a layer": nodes, **self._left_out, **(notes or {})},
        )

    def _ratios(self, times: Times) -> dict[str, Spread | float]:
        ratios: dict[str, Spread | float] = {
            f"{name} overhead, %": times.overhead_percent(name, base)
            for name, base in self._bases.items()
        }
        if "merged" in self._replays:  # the same kernels twice: what is not told apart
            ratios["merged / base"] = times.ratio("merged", "base")
        if "ours" in self._replays:
            others = [name for name in self._bases if not name.startswith("ours")]
            ratios |= {f"{name} / ours": times.ratio(name, "ours") for name in others}
            ratios |= self._overheads_by_ours(times, others)
        if "ours" in self._replays and "base_merged" in self._replays:
            ratios["base / base_merged"] = times.ratio("base", "base_merged")
            ratios["ours over base_merged, %"] = times.overhead_percent("ours", "base_merged")
        return ratios

    def _overheads_by_ours(self, times: Times, others: Sequence[str]) -> dict[str, Spread | float]:
        """How many times more than ours the others add, in microseconds."""

        def added(name: str) -> float:
            return times.median(name) - times.median(self._bases[name])

        ours = added("ours")
        if ours <= 0:
            return {}
        return {f"{name} overhead / ours overhead": added(name) / ours for name in others}

    def _differences(self, reference: str) -> dict[str, Spread | float]:
        """||version - reference|| / ||reference|| of every version that adds LoRA."""
        expected = self._outputs[reference]
        return {
            f"{name} / {reference}, difference": difference(self._outputs[name], expected)
            for name in self._bases
            if name != reference
        }
