"""Resolve target modules and LoRA ranks from the options, from real adapters, or from both."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trt_lora.builder.config import DEFAULT_MAX_LORA_RANK, BuildConfig
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.modules import (
    ALL_LINEAR,
    EXPERTS_GATE_UP,
    PARTS,
    expert_of,
    module_of,
)
from trt_lora.plugins.contract.sites import MAX_RANK
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.load import load_adapter


@dataclass(frozen=True)
class ResolvedLoRA:
    """The target modules, and the ranks of the optimization profiles."""

    targets: Targets
    max_rank: int
    opt_rank: int  # what the engine is tuned for
    max_loras: int = 0  # slots of the stacks; 0: one adapter at a time
    vectors: bool = False  # whether sites take a scale and a bias too
    saved: tuple[str, ...] = ()  # modules that adapters may have whole, by TensorRT-LLM's name
    adapters: tuple[Adapter, ...] = ()  # those that the engine must be able to take

    @property
    def stack_rank(self) -> int | None:
        """The rank of the stacks; None without."""
        return self.max_rank if self.max_loras else None


def resolve_lora(config: BuildConfig) -> ResolvedLoRA:
    """Return targets and ranks; the adapters in `config.lora_dirs` are read for theirs.

    The optimal rank is the commonest among the adapters' sites, the larger of equals; without
    adapters it is the maximum, capped at 16, which most published adapters do not exceed. With
    slots the maximum is rounded up to a power of two.

    Raises:
        ConfigError: an option contradicts an adapter, or a target is not known.
        AdapterError: an adapter cannot be read.
    """
    adapters = read_adapters(config.lora_dirs, are_vectors_taken=config.lora_vectors)
    ranks = [each for adapter in adapters for each in _ranks_of(adapter)]
    saved = config.lora_saved_modules
    _check_saved_cover(saved, adapters)
    targets = Targets.from_names((*(config.target_modules or _modules_of(ranks)), *saved))
    lora = with_ranks(targets, adapters, ranks, config.max_lora_rank)
    lora = replace(with_slots(lora, config.max_loras), saved=saved)
    return replace(lora, vectors=config.lora_vectors)


def read_adapters(directories: Iterable[Path], *, are_vectors_taken: bool) -> tuple[Adapter, ...]:
    """Return the adapters that an engine must be able to take.

    Raises:
        AdapterError: one cannot be read, or has what no engine takes.
    """
    adapters = tuple(load_adapter(directory) for directory in directories)
    for adapter in adapters:
        adapter.check_usable()
        adapter.check_vectors(are_taken=are_vectors_taken)
        log_warnings(adapter.source, adapter.warnings)
    return adapters


def with_ranks(
    targets: Targets,
    adapters: tuple[Adapter, ...],
    ranks: Collection[tuple[str, int]],
    max_lora_rank: int | None,
) -> ResolvedLoRA:
    """Return targets with the ranks of an engine.

    Args:
        targets: which have to cover the adapters.
        adapters: those of the options.
        ranks: of theirs, by path.
        max_lora_rank: the option; None: the adapters' largest, or the default.

    Raises:
        ConfigError: an option contradicts an adapter.
    """
    max_rank = _max_rank(max_lora_rank, ranks)
    _check_targets_cover(targets, ranks)
    return ResolvedLoRA(targets, max_rank, min(_opt_rank(ranks), max_rank), adapters=adapters)


def with_slots(lora: ResolvedLoRA, max_loras: int) -> ResolvedLoRA:
    """Return the same of an engine with as many slots; 0: without."""
    # A power of two, so that a row's bits do not depend on its slot (lora_function.py).
    most = 1 << (lora.max_rank - 1).bit_length() if max_loras else lora.max_rank
    return replace(lora, max_rank=most, max_loras=max_loras)


def _ranks_of(adapter: Adapter) -> list[tuple[str, int]]:
    """The rank at every path; gate and up of an expert take theirs together."""
    experts = {
        path: f"{one[0]}.{one[1]}"
        for path in adapter.ranks
        if (one := expert_of(path)) and _module_name(path) in PARTS[EXPERTS_GATE_UP]
    }
    sums = Counter[str]()
    for path, expert in experts.items():
        sums[expert] += adapter.ranks[path]
    tokens = [(path, len(rows.ids)) for path, rows in adapter.tokens.items() if rows.ids]
    factors = [(path, sums[experts.get(path, "")] or rank) for path, rank in adapter.ranks.items()]
    return factors + tokens


def _modules_of(ranks: list[tuple[str, int]]) -> list[str]:
    return sorted({_module_name(path) for path, _ in ranks})


def _module_name(path: str) -> str:
    module = module_of(path)
    return module.name if module else ALL_LINEAR


def _max_rank(asked: int | None, ranks: Iterable[tuple[str, int]]) -> int:
    needed = max((rank for _, rank in ranks), default=0)
    if needed > MAX_RANK:
        raise ConfigError(f"an adapter has rank {needed}; engines take {MAX_RANK} at most")
    if asked is None:
        return needed or DEFAULT_MAX_LORA_RANK
    if asked < needed:
        raise ConfigError(
            f"--max-lora-rank is {asked}, but an adapter of --lora-dir has rank "
            f"{needed}; raise it or leave it out"
        )
    return asked


def _opt_rank(ranks: Iterable[tuple[str, int]]) -> int:
    counts = Counter(rank for _, rank in ranks)
    return max(counts, key=lambda rank: (counts[rank], rank), default=16)


def _check_saved_cover(saved: Collection[str], adapters: Iterable[Adapter]) -> None:
    for adapter in adapters:
        for path, rows in adapter.tokens.items():
            if not rows.ids and (name := _module_name(path)) not in saved:
                raise ConfigError(f"{rows.asked_by}; or pass --lora-saved-modules {name}")


def _check_targets_cover(targets: Targets, ranks: Iterable[tuple[str, int]]) -> None:
    left_out = list(dict.fromkeys(path for path, _ in ranks if not targets.includes(path)))
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise ConfigError(
            f"an adapter of --lora-dir has {left_out[0]}{more}, which --lora-target-modules "
            f"{' '.join(targets.modules)} leaves out; add "
            f"{' '.join(sorted(set(map(_module_name, left_out))))}, or leave the option out"
        )
