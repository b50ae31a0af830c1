"""Which linears are targets: one rule for the modules of a model and the nodes of its graph."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trt_lora.plugins.contract.modules import ALL_LINEAR, module_of
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError

LINEAR_CLASSES = ("Linear", "Conv1D")  # ends of class names; Conv1D is GPT-2's linear


@dataclass(frozen=True)
class LeftAlone:
    """A matrix product that takes no LoRA."""

    path: str  # the module's path, or the node's name where it has none
    reason: str


@dataclass(frozen=True)
class SiteList:
    """Where LoRA goes, and what takes none."""

    sites: tuple[Site, ...]
    left_alone: tuple[LeftAlone, ...]


def not_linear(kind: str) -> str:
    """Return why a module of class `kind` takes no LoRA; empty if it is a linear."""
    return "" if kind.endswith(LINEAR_CLASSES) else f"its module is a {kind}, not a linear"


def not_targeted(targets: Mapping[str, frozenset[str]], path: str, head: str) -> str:
    """Return why the linear at `path` is no target; empty if it is one.

    Args:
        targets: what `resolve_targets` returned.
        path: of the module.
        head: path of the output head, which `all-linear` leaves out, as PEFT does.
    """
    module = module_of(path)
    wanted = frozenset[str]().union(*targets.values())
    if module is not None and module.name in wanted:
        return ""
    if ALL_LINEAR in wanted:
        return "it is the output head" if path == head else ""
    return f"{module.name if module else 'its module'} is not a target"


def check_targets_matched(
    targets: Mapping[str, frozenset[str]], sites: Iterable[Site], left_alone: Iterable[LeftAlone]
) -> None:
    """Check that every target is the module of a site.

    Raises:
        ConfigError: one is not; the message lists the modules that there are.
    """
    present = {module_of(site.path) for site in sites}
    others = {module_of(item.path) for item in left_alone}
    named = {module.name for module in present if module}
    known = named | {module.name for module in others if module}
    for target, modules in targets.items():
        if not modules & named and not (ALL_LINEAR in modules and present):
            raise ConfigError(
                f"this model has no layer for the LoRA target module {target!r}; "
                f"it has: {', '.join(sorted(known)) or 'none that is known'}"
            )
