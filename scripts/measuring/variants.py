"""Variants of a benchmark: the base model, adapters, and random adapters of several ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.scripts.measuring.random_weights import random_weights

BASE, MIXED = "(base)", "(another in every row)"


@dataclass(frozen=True)
class Variant:
    """Who answers, and the size of its adapter; of several in a batch, the largest."""

    name: str
    adapters: tuple[str, ...] = ()  # those that the rows of a batch take in turn
    rank: int = 0  # the largest of a site; 0: the base model
    nbytes: int = 0  # of A and B in the executor


class BenchmarkRun(Protocol):
    """An engine with all variants loaded."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The base model first."""
        ...

    def batch(self, variant: Variant, rows: int) -> Scheduler:
        """Return a batch without sequences, which the variant answers from now on."""
        ...

    def adapter_of(self, variant: Variant, row: int) -> str | None:
        """Return what `Scheduler.submit` is to be given for a row."""
        ...


class SharedRun:
    """`BenchmarkRun` of an engine that takes one adapter at a time."""

    def __init__(self, engine: Executor, paths: Mapping[str, Path], ranks: tuple[int, ...]) -> None:
        """Load them.

        Raises:
            AdapterError: an adapter cannot be read, does not fit, or has the name of another.
        """
        self._engine, self._manager = engine, LoRAManager()
        self._manager.initialize_engine_bindings(engine)
        self._batches: dict[int, Scheduler] = {}
        names = [*paths, *map(_random_name, ranks)]
        for name, path in paths.items():
            self._manager.load_weights(name, path)
        for rank in ranks:
            self._manager.add_weights(_random_name(rank), random_weights(engine.manifest, rank))
        loaded = [_variant(name, self._manager.get_coverage(name)) for name in names]
        self.variants: tuple[Variant, ...] = (Variant(BASE), *loaded)

    def batch(self, variant: Variant, rows: int) -> Scheduler:
        """Switch; a static cache stays for the next variant."""
        if variant.adapters:
            self._manager.switch_weights(variant.name)
        else:
            self._manager.reset_weights()
        if rows not in self._batches:
            self._batches = {rows: whole_prompts(self._engine, rows, manager=self._manager)}
        self._batches[rows].use_active_adapter()
        return self._batches[rows]

    def adapter_of(self, variant: Variant, row: int) -> str | None:
        """None: all rows have the active one."""
        del variant, row
        return None


class SlotRun:
    """`BenchmarkRun` of an engine with slots; rows with an adapter each are one more variant."""

    def __init__(self, engine: Executor, paths: Mapping[str, Path], ranks: tuple[int, ...]) -> None:
        """Load them to host memory.

        Raises:
            AdapterError: an adapter cannot be read, does not fit, or has the name of another.
        """
        self._engine, self._adapters = engine, SlotAdapters(engine)
        self._batches: dict[int, Scheduler] = {}
        for name, path in paths.items():
            self._adapters.load_weights(name, path)
        for rank in ranks:
            weights = random_weights(engine.manifest, rank)
            adapter = Adapter(_random_name(rank), {n: weight_of(n, w) for n, w in weights.items()})
            self._adapters.add_adapter(_random_name(rank), adapter)
        loaded = [
            _variant(name, self._adapters.get_coverage(name)) for name in self._adapters.names
        ]
        together = loaded[-engine.manifest.max_loras :]  # random ones, and trained ones if need be
        self.variants: tuple[Variant, ...] = (Variant(BASE), *loaded)
        if len(together) > 1:
            self.variants += (_mixed(together),)

    def batch(self, variant: Variant, rows: int) -> Scheduler:
        """Bring its adapters into slots; the cache stays for the next variant."""
        for name in variant.adapters[:rows]:
            self._adapters.activate(name)
        if rows not in self._batches:
            self._batches = {rows: whole_prompts(self._engine, rows, adapters=self._adapters)}
        return self._batches[rows]

    def adapter_of(self, variant: Variant, row: int) -> str | None:
        """Its adapters, in turn."""
        names = variant.adapters
        return names[row % len(names)] if names else None


def whole_prompts(
    engine: Executor,
    rows: int,
    *,
    manager: LoRAManager | None = None,
    adapters: SlotAdapters | None = None,
) -> Scheduler:
    """Return a scheduler that runs every prompt whole, in one step with the others, and again."""
    return Scheduler(
        engine,
        adapters,
        manager=manager,
        rows=rows,
        max_num_batched_tokens=rows * engine.manifest.max_input_len,
        shares_prefixes=False,
    )


def run_of(engine: Executor, paths: Mapping[str, Path], ranks: tuple[int, ...]) -> BenchmarkRun:
    """Return the run of an engine.

    Args:
        engine: a running engine.
        paths: adapters by name.
        ranks: of random adapters, one each.

    Raises:
        ConfigError: a name is one that the benchmark gives itself.
        AdapterError: an adapter cannot be read, or does not fit.
    """
    own = {BASE, MIXED, *map(_random_name, ranks)}
    for name in paths:
        if name in own:
            raise ConfigError(f"the name {name!r} is the benchmark's own; give the adapter another")
    has_slots = engine.manifest.max_loras
    kind = SlotRun if has_slots else SharedRun
    return kind(engine, paths, ranks)


def _random_name(rank: int) -> str:
    return f"random, rank {rank}"


def _variant(name: str, coverage: Coverage | None) -> Variant:
    assert coverage is not None  # an engine is bound
    rank = max((site.rank for site in coverage.sites), default=0)
    return Variant(name, (name,), rank, coverage.nbytes)


def _mixed(together: list[Variant]) -> Variant:
    names = tuple(variant.name for variant in together)
    rank = max(variant.rank for variant in together)
    return Variant(MIXED, names, rank, sum(variant.nbytes for variant in together))
