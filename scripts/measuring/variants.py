"""Variants of a benchmark: the base model, adapters, and random adapters of several ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.measuring.answer_times import AnswerTimes, answer_times
from trt_lora.scripts.measuring.graph_runs import GraphWorkload, graph_times
from trt_lora.scripts.measuring.random_weights import random_weights
from trt_lora.scripts.measuring.workload import BatchWorkload

Workload = BatchWorkload | GraphWorkload
BASE, MIXED = "(base)", "(another in every row)"


@dataclass(frozen=True)
class Variant:
    """Who answers, and the size of its adapter; of several in a batch, the largest."""

    name: str
    adapters: tuple[str, ...] = ()  # those that the rows of a batch take in turn
    rank: int = 0  # the largest of a site; 0: the base model
    nbytes: int = 0  # of A and B in the executor


class BenchmarkRun:
    """An engine with all variants loaded; with slots, rows with another adapter each are one."""

    def __init__(self, engine: Executor, paths: Mapping[str, Path], ranks: tuple[int, ...]) -> None:
        """Load them.

        Raises:
            AdapterError: an adapter cannot be read, does not fit, or has the name of another.
        """
        self._engine, self._adapters = engine, AdapterStore(engine)
        self._batches: dict[int, Scheduler] = {}
        for name, path in paths.items():
            self._adapters.load(name, path)
        for rank in ranks:
            weights = random_weights(engine.manifest, rank)
            adapter = Adapter(_random_name(rank), {n: weight_of(n, w) for n, w in weights.items()})
            self._adapters.add(_random_name(rank), adapter)
        loaded = [
            _variant(name, self._adapters.get_coverage(name)) for name in self._adapters.names
        ]
        self.variants: tuple[Variant, ...] = (Variant(BASE), *loaded)
        slots = engine.manifest.max_loras
        together = loaded[-slots:] if slots else []  # random ones, and trained ones if need be
        if len(together) > 1:
            self.variants += (_mixed(together),)

    def batch(self, variant: Variant, rows: int) -> Scheduler:
        """Return a batch without sequences; the cache stays for the next variant."""
        for name in variant.adapters[:rows]:
            self._adapters.bindings.activate(name)
        if rows not in self._batches:
            self._batches = {rows: whole_prompts(self._engine, self._adapters, rows)}
        return self._batches[rows]

    def times(self, variant: Variant, workload: Workload, seed: int) -> AnswerTimes:
        """Return the seconds of one turn of a variant; other seeds, other prompts.

        Raises:
            OutputError: logits are NaN or infinite.
        """
        names = [self.adapter_of(variant, row) for row in range(workload.rows)]
        if isinstance(workload, GraphWorkload):
            return graph_times(self._engine, self._adapters, names, workload)
        prompts = workload.prompts(self._engine.manifest, seed)
        return answer_times(self.batch(variant, workload.rows), prompts, names, workload.new_tokens)

    def adapter_of(self, variant: Variant, row: int) -> str | None:
        """Return the adapter of a row: the variant's, in turn."""
        names = variant.adapters
        return names[row % len(names)] if names else None


def whole_prompts(engine: Executor, adapters: AdapterStore, rows: int) -> Scheduler:
    """Return a scheduler that runs every prompt whole, in one step with the others, and again."""
    tokens = rows * engine.manifest.max_input_len
    config = ServingConfig(rows=rows, max_num_batched_tokens=tokens, shares_prefixes=False)
    return Scheduler(engine, adapters, config)


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
    return BenchmarkRun(engine, paths, ranks)


def _random_name(rank: int) -> str:
    return f"random, rank {rank}"


def _variant(name: str, coverage: Coverage) -> Variant:
    rank = max((site.rank for site in coverage.sites), default=0)
    return Variant(name, (name,), rank, coverage.nbytes)


def _mixed(together: list[Variant]) -> Variant:
    names = tuple(variant.name for variant in together)
    rank = max(variant.rank for variant in together)
    return Variant(MIXED, names, rank, sum(variant.nbytes for variant in together))
