"""Adapters of diffusion models: one safetensors file, in any of the names that trainers write.

Names are looked up among the spellings of the engine's own modules, so that every module is found
or named. Shapes are compared before a value of a factor is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trt_lora.plugins.checked import check_choice
from trt_lora.plugins.contract.sites import parse_binding
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.diffusion.alphas import METADATA, Alphas
from trt_lora.runtime.adapters.formats.diffusion.base_family import (
    families_of_engine,
    family_of_file,
)
from trt_lora.runtime.adapters.formats.diffusion.located import Located, locate
from trt_lora.runtime.adapters.formats.diffusion.spellings import (
    COMPONENTS,
    Spellings,
    components_of,
)
from trt_lora.runtime.adapters.formats.diffusion.tensor_names import (
    ADDED,
    MAGNITUDE,
    ModuleTensors,
    is_foreign,
    modules_of,
    split_name,
    why_unusable,
)
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import SafetensorsFile, StoredTensor
from trt_lora.runtime.manifest import Manifest

_BLOCK = 1 << 16  # values that are looked at for one that is not zero
_DORA = (
    "dora_scale: DoRA rescales the base weight, which an engine cannot do at run time; train the "
    "adapter without it"
)


def is_of_diffusion(file: SafetensorsFile, manifest: Manifest | None) -> bool:
    """Return whether a file is read by these names; those of the engine's bindings go first."""
    names = [tensor.name for tensor in file.tensors]
    if METADATA in file.metadata:
        return True
    if manifest and any(_is_binding(name, manifest) for name in names):
        return False
    return any(map(is_foreign, names)) or (manifest is not None and _is_spelled(names, manifest))


def _is_spelled(names: Sequence[str], manifest: Manifest) -> bool:
    """Whether a module has a prefix, or a name that is none of a path."""
    spellings = _spellings(manifest)
    found = (spellings.find(stem) for stem, end in map(split_name, names) if end)
    return any(prefix or place for prefix, _, place in found)


def _is_binding(name: str, manifest: Manifest) -> bool:
    parsed = parse_binding(name)
    own = manifest.binding_names.binding(*parsed) if parsed else name
    return name in manifest.lora_bindings or own in manifest.lora_bindings


def _spellings(manifest: Manifest) -> Spellings:
    return Spellings([*(site.path for site in manifest.sites), *manifest.no_effect])


def adapter_of_diffusion(
    path: Path, file: SafetensorsFile, manifest: Manifest | None, component: str = ""
) -> Adapter:
    """Return what a file has for one engine.

    A [k, r] and B [r, n] are read when they are cast; those of LoHa, LoKr and LoCon with a core are
    computed then. A of a convolution is `Weight.flattened`.

    Args:
        path: of the file, for messages.
        file: its tensors.
        manifest: of the engine.
        component: one of COMPONENTS that the engine is; '' for the manifest's, or for the one whose
            prefix matches.

    Raises:
        AdapterError: there is no manifest, the file is for another base model, two of its modules
            are one, or an alpha is no number.
        ConfigError: there is no such component.
    """
    if manifest is None:
        raise AdapterError(
            f"{path} has the names of a diffusion model's modules, which an engine explains; load "
            "it after initialize_engine_bindings, or convert it with --engine DIR"
        )
    if component := component or manifest.component:
        check_choice("component", component, COMPONENTS)
    spellings, sites = _spellings(manifest), {site.path: site for site in manifest.sites}
    modules = [locate(module, spellings, sites) for module in modules_of(file.tensors)]
    own = spellings.own(component, modules, path)
    reading = _Reading(Alphas(path, file.metadata, [module.name for module in modules]))
    mine = [module for module in modules if components_of(module.prefix) & own]
    for other in (module for module in modules if not components_of(module.prefix) & own):
        reading.pass_over(other)
    _check_base(path, file, manifest, mine)
    for module in mine:
        reading.take(module)
    return Adapter(
        str(path),
        reading.weights,
        base_fingerprint=file.fingerprint,
        unusable_keys=reading.unusable,
        ignored=reading.ignored,
        of_others=frozenset(reading.of_others),
        vectors_from=f"{path}: {reading.rescaled[0]:.200} has {_DORA}" if reading.rescaled else "",
        task_type=None,
    )


def _check_base(
    path: Path, file: SafetensorsFile, manifest: Manifest, modules: Sequence[Located]
) -> None:
    """Refuse a file for another base model in one sentence; one that fits may be called anything.

    Raises:
        AdapterError: it is for another.
    """
    family, because = family_of_file(file.metadata)
    engines = families_of_engine([site.path for site in manifest.sites])
    is_named = bool(family and engines) and family not in engines
    wide = [module for module in modules if module.is_of_other_width]
    lost = [module for module in modules if module.place is None]
    if not wide and not (is_named and lost):
        return
    reasons = [f"its metadata name {family} ({because})"] if is_named else []
    if wide and (matrix := wide[0].matrix):
        (n, k), (own_n, own_k) = matrix.shape, wide[0].wanted
        reasons.append(
            f"{len(wide)} of its {len(modules)} modules have other widths, such as "
            f"{wide[0].module.stem:.200} with k={k} and n={n}, which here are {own_k} and {own_n}"
        )
    if lost:
        reasons.append(f"{len(lost)} have no place, such as {lost[0].module.stem:.200}")
    engine = f", an engine of {' or '.join(sorted(engines))}" if engines else ""
    raise AdapterError(
        f"{path} is for another base model than {manifest.base_model.name}{engine}: "
        f"{'; '.join(reasons)}"
    )


@dataclass
class _Reading:
    """What becomes of the tensors of a file, each exactly one thing."""

    alphas: Alphas
    weights: dict[str, Weight] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    of_others: set[str] = field(default_factory=set)  # tensors of another component
    rescaled: list[str] = field(default_factory=list)  # modules with DoRA

    def pass_over(self, other: Located) -> None:
        """Ignore a module of another component."""
        names = " or ".join(sorted(components_of(other.prefix)))
        self.ignored |= dict.fromkeys(other.module.names, f"it is of {names}, another component")
        self.of_others.update(other.module.names)

    def take(self, located: Located) -> None:
        """Take the weights of a module, or all of its tensors as unusable: no half is applied.

        Raises:
            AdapterError: another module has the same place, or an alpha is no number.
        """
        module, names = self._without_zeros(located.module), located.module.names
        if not module.tensors:
            return
        reasons = {end: reason for end in module.tensors if (reason := why_unusable(end))}
        if problem := next(iter(reasons.values()), located.problem):
            for end, tensor in module.tensors.items():
                self.unusable[tensor.name] = reasons.get(end, problem)
            return
        weights = located.weights(self.alphas)
        if twice := self.weights.keys() & weights:
            first = self.weights[min(twice)]
            raise AdapterError(
                f"{self.alphas.path}: {listed([*first.names, *names])} are for one module"
            )
        self.weights |= weights
        if MAGNITUDE in module.parts:
            self.rescaled.append(module.stem)

    def _without_zeros(self, module: ModuleTensors) -> ModuleTensors:
        zeros = {end for end, tensor in module.tensors.items() if end in ADDED and _is_zero(tensor)}
        for end in zeros:
            self.ignored[module.tensors[end].name] = "it has no effect: all its values are 0"
        return ModuleTensors(
            module.stem, {e: t for e, t in module.tensors.items() if e not in zeros}
        )


def _is_zero(tensor: StoredTensor) -> bool:
    return not any(np.any(block.astype(np.float32)) for block in tensor.blocks(_BLOCK))
