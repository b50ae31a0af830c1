"""PEFT tensors that PEFT itself ignores."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.adapters.formats.peft_targets import Rule, target_rule

_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_.*")  # of any kind
_UNTARGETED = "its config does not target the module, so that PEFT does not apply it either"


@dataclass(frozen=True)
class Targeting:
    """Target rule, ignored tensors and warnings of a PEFT config for its own file."""

    targets: Rule
    ignored: Mapping[str, str]  # tensor -> why it is not applied
    warnings: tuple[str, ...]


def targeting_of(fields: Mapping[str, Any], names: Collection[str]) -> Targeting:
    """Return what the fields of a config say of tensors of these names."""
    matches = ((name, _TENSOR.fullmatch(name)) for name in names)
    paths = {name: match["path"] for name, match in matches if match}
    rule = cache(target_rule(fields, len(paths)))
    ignored = {name: _UNTARGETED for name, path in paths.items() if rule(path) is False}
    untold = list(dict.fromkeys(path for path in paths.values() if rule(path) is None))
    return Targeting(rule, ignored, (*_ignored_warning(ignored), *_untold_warning(untold, fields)))


def _ignored_warning(ignored: Collection[str]) -> Iterator[str]:
    if ignored:
        yield (
            f"{len(ignored)} of its tensors are ignored, as PEFT ignores them, for its config does "
            f"not target their modules: {listed([*ignored])}"
        )


def _untold_warning(paths: list[str], fields: Mapping[str, Any]) -> Iterator[str]:
    if paths:
        said = ", ".join(f"{name} is {shown(value)}" for name, value in fields.items())
        yield (
            f"whether its config targets {listed(paths)} cannot be told without the model "
            f"({said or 'it has no target_modules'}); they are applied, PEFT may ignore them"
        )
