"""Target modules of LoRA: one rule for the modules of a model and the nodes of its graph."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from trt_lora.plugins.contract.modules import (
    ALL_LINEAR,
    EMBEDDING,
    is_embedding,
    is_experts,
    is_router,
    module_of,
    resolve_targets,
    target_names,
)
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError

ROUTER_CLASS = "Router"  # end of the class names of what finds tokens their experts
LINEAR_CLASSES = ("Linear", "Conv1D", ROUTER_CLASS)  # ends of class names; Conv1D is GPT-2's linear


@dataclass(frozen=True)
class LeftAlone:
    """A matrix product that takes no LoRA."""

    path: str  # the module's path, or the node's name where it has none
    reason: str


@dataclass(frozen=True)
class SiteList:
    """The sites of LoRA, and the linears that are none."""

    sites: tuple[Site, ...]
    left_alone: tuple[LeftAlone, ...]


def not_linear(kind: str) -> str:
    """Return why a module of class `kind` takes no LoRA; empty if it is a linear."""
    return "" if kind.endswith(LINEAR_CLASSES) else f"its module is a {kind}, not a linear"


@dataclass(frozen=True)
class Targets:
    """The modules that get LoRA, by the names that were asked for."""

    modules: Mapping[str, frozenset[str]]  # what each name means, as `resolve_targets` returns it

    @classmethod
    def from_names(cls, names: Iterable[str]) -> "Targets":
        """Return the targets that are meant by names of modules, suffixes or `all-linear`.

        Raises:
            ConfigError: a name is not known.
        """
        return cls(resolve_targets(names))

    @cached_property
    def all_modules(self) -> frozenset[str]:
        """Every module that some name means."""
        return frozenset[str]().union(*self.modules.values())

    @property
    def has_embedding(self) -> bool:
        """Whether the input embedding is one, which no name but its own means."""
        return EMBEDDING in self.all_modules

    def includes(self, path: str, head: str = "") -> bool:
        """Return whether the linear at `path` is a target; `head` as in `refusal`."""
        return not self.refusal(path, head)

    def refusal(self, path: str, head: str = "") -> str:
        """Return why the linear at `path` is no target; empty if it is one.

        Args:
            path: of the module.
            head: path of the output head, which `all-linear` leaves out, as it does routers, as in
                PEFT.
        """
        module = module_of(path)
        if target_names(path) & self.all_modules:
            return ""
        if ALL_LINEAR in self.all_modules:
            if is_router(path):
                return "it is a router, which all-linear leaves out"
            if is_experts(path):
                return "it is of experts, which all-linear leaves out"
            if is_embedding(path):
                return "it is an embedding, which all-linear leaves out"
            return "it is the output head" if path == head else ""
        return f"{module.name if module else 'its module'} is not a target"

    def unmatched(self, paths: Collection[str]) -> list[str]:
        """Return the names that none of the sites at `paths` belongs to."""
        known = {name for path in paths for name in target_names(path)}
        if paths:
            known.add(ALL_LINEAR)
        return [name for name, modules in self.modules.items() if not modules & known]


def check_targets_matched(
    targets: Targets, sites: Iterable[Site], left_alone: Iterable[LeftAlone]
) -> None:
    """Check that every target is the module of a site.

    Raises:
        ConfigError: one is not; the message lists the modules that there are.
    """
    paths = [site.path for site in sites]
    for target in targets.unmatched(paths):
        modules = map(module_of, [*paths, *(item.path for item in left_alone)])
        known = sorted({module.name for module in modules if module})
        raise ConfigError(
            f"this model has no layer for the LoRA target module {target!r}; "
            f"it has: {', '.join(known) or 'none that is known'}"
        )
