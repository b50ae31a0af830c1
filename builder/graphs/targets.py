"""Targets of LoRA in a graph: ends of the paths that it has, rather than a table's names."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.builder.resolved_lora import ResolvedLoRA, read_adapters, with_ranks
from trt_lora.builder.targets import LeftAlone, Targets
from trt_lora.plugins.contract.modules import ALL_LINEAR, MODULES
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, listed

CONVOLUTIONS = "conv"  # those with a kernel, which all-linear leaves out
_MODULES = {ALL_LINEAR, *(module.name for module in MODULES)}


@dataclass(frozen=True)
class GraphTargets(Targets):
    """Whole ends of paths, such as `to_q` or `ff.net.0.proj`; TensorRT-LLM's names mean theirs."""

    kernels: frozenset[str] = frozenset()  # paths of convolutions with more than one tap

    @classmethod
    def from_names(cls, names: Iterable[str]) -> "GraphTargets":
        """Return the targets of these names; whether the graph has them is seen later."""
        return cls({name: frozenset({name} & _MODULES) for name in names})

    def refusal(self, path: str, head: str = "") -> str:
        """See `Targets`; a path that ends with a name is a target."""
        if any(_ends(path, name) for name in self.modules):
            return ""
        if path not in self.kernels:
            return super().refusal(path, head)
        if CONVOLUTIONS in self.modules:
            return ""
        return f"it is a convolution with a kernel, which {CONVOLUTIONS} adds"

    def unmatched(self, paths: Collection[str]) -> list[str]:
        """See `Targets`."""
        missing = super().unmatched(paths)
        if self.kernels.intersection(paths):
            missing = [name for name in missing if name != CONVOLUTIONS]
        return [name for name in missing if not any(_ends(path, name) for path in paths)]


def resolve_graph_lora(config: GraphConfig) -> ResolvedLoRA:
    """Return targets and ranks; see `resolve_lora`. Adapters target the paths that they have.

    Raises:
        ConfigError: an option contradicts an adapter.
        AdapterError: an adapter cannot be read.
    """
    adapters = read_adapters(config.lora_dirs, are_vectors_taken=False)
    ranks = [each for adapter in adapters for each in adapter.ranks.items()]
    targets = GraphTargets.from_names(config.target_modules or dict.fromkeys(p for p, _ in ranks))
    return with_ranks(targets, adapters, ranks, config.max_lora_rank)


def check_graph_targets(
    targets: Targets,
    sites: Collection[Site],
    left_alone: Collection[LeftAlone],
    dead: Collection[str] = (),
) -> None:
    """Check that there is a site, and that every target is one.

    Args:
        targets: what was asked for.
        sites: that were found.
        left_alone: linears that are none.
        dead: paths of targets that no output depends on, which are asked for in vain.

    Raises:
        ConfigError: there is none; the message says why its linears are left alone, or what is
            spelled alike.
    """
    reasons = {item.path: item.reason for item in left_alone}
    if dead and not sites:
        raise ConfigError(f"no output depends on what takes LoRA here: {listed([*dead])}")
    for target in targets.unmatched([*(site.path for site in sites), *dead]):
        refused = [path for path in reasons if _ends(path, target) or target == ALL_LINEAR]
        if refused:
            first = {reasons[path]: f"{reasons[path]} ({path})" for path in reversed(refused)}
            why = listed(sorted(first.values()), "; ")
            raise ConfigError(f"no linear of {target!r} in this graph takes LoRA: {why}")
        raise no_such_target("this graph", target, [*(site.path for site in sites), *reasons])


def no_such_target(where: str, target: str, paths: Collection[str]) -> ConfigError:
    """Return the error of a target that is the end of no path."""
    ends = dict.fromkeys(_ends_of(paths))
    return ConfigError(
        f"{where} has no linear whose path ends with {target!r}"
        f"{did_you_mean(target, ends)}; its paths end with: "
        f"{', '.join(dict.fromkeys(path.rpartition('.')[2] for path in paths)) or 'nothing'}"
    )


def _ends(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _ends_of(paths: Iterable[str]) -> Iterable[str]:
    """Every end of every path."""
    for path in paths:
        parts = path.split(".")
        yield from (".".join(parts[start:]) for start in range(len(parts)))
