"""A module of a file at its place in an engine: does it fit, and its weights by binding name."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trt_lora.plugins.contract.sites import MAGNITUDE as MAGNITUDE_VECTOR
from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.diffusion.alphas import Alphas
from trt_lora.runtime.adapters.formats.diffusion.factors import LowRank, low_rank
from trt_lora.runtime.adapters.formats.diffusion.spellings import PEFT, Spellings
from trt_lora.runtime.adapters.formats.diffusion.tensor_names import (
    ALPHA,
    KNOWN,
    MAGNITUDE,
    ModuleTensors,
)
from trt_lora.runtime.adapters.formats.diffusion.transformer_names import ModulePlace
from trt_lora.runtime.adapters.weight import Weight, concatenate
from trt_lora.runtime.files.safetensors_file import StoredTensor
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array

_NO_CONFIG = (
    "its scale is in PEFT's adapter_config.json; pass the directory that has both, or save the "
    "adapter with its alpha"
)
_TAPS = "convolutions of several taps take LoRA in an engine built with --lora-target-modules conv"


@dataclass(frozen=True)
class Located:
    """A module of a file, and where it is in the engine."""

    module: ModuleTensors
    prefix: str
    name: str  # behind the prefix
    place: ModulePlace | None
    matrix: LowRank | None
    sites: tuple[Site, ...]  # at the place; none where the place has no effect
    problem: str  # why it has no weights

    @property
    def wanted(self) -> tuple[int, int]:
        """What `matrix.shape` has to be at the place, [n, k]."""
        return sum(site.n for site in self.sites), self.sites[0].k

    @property
    def fits(self) -> bool:
        """Whether its place takes LoRA of its shape."""
        matrix = self.matrix if self.sites else None
        return matrix is not None and matrix.shape == self.wanted

    @property
    def is_of_other_width(self) -> bool:
        """Whether its place takes LoRA of another shape."""
        return bool(self.matrix and self.sites) and not self.fits

    def weights(self, alphas: Alphas) -> dict[str, Weight]:
        """Return A [k, r] and B [r, n], and DoRA's magnitude [n], of every path of its place.

        Raises:
            AdapterError: an alpha is no number.
        """
        assert self.matrix is not None  # there is no problem
        alpha = self.module.parts.get(ALPHA)
        scale = alphas.scale(alpha, self.prefix, self.name, self.matrix.divisor)
        a, b = self.matrix.down.transposed(), self.matrix.up.transposed().times(scale)
        b = replace(b, names=(*b.names, *([alpha.name] if alpha else ())))
        names, found = BindingNames.LORA, dict[str, Weight]()
        for path, columns in self._columns(b, axis=1):
            found |= zip(names.pair(path), (a, columns), strict=True)
        if stored := self.module.parts.get(MAGNITUDE):
            vector = _magnitude(stored, self.matrix.shape[0])
            for path, part in self._columns(vector, axis=0):
                found[names.binding(MAGNITUDE_VECTOR, path)] = part
        return found

    def _columns(self, whole: Weight, axis: int) -> Iterator[tuple[str, Weight]]:
        """The part of each path, of what has an axis of outputs."""
        assert self.place is not None
        start, width = 0, whole.shape[axis]
        if self.place.swapped:
            half = (axis, width // 2, width), (axis, 0, width // 2)
            whole = concatenate([whole.part(*span) for span in half], axis)
        if len(self.place.paths) == 1 or not self.sites:
            yield from ((path, whole) for path in self.place.paths)
            return
        for site in self.sites:
            yield site.path, whole.part(axis, start, start + site.n)
            start += site.n


def locate(module: ModuleTensors, spellings: Spellings, sites: Mapping[str, Site]) -> Located:
    """Find the place of a module, and its factors if it has one."""
    prefix, name, place = spellings.find(module.stem)
    own = tuple(sites[path] for path in place.paths if path in sites) if place else ()
    if place is None or 0 < len(own) < len(place.paths):
        problem = f"module {module.stem:.200} has no site in this engine{_hint(module)}"
        return Located(module, prefix, name, None, None, (), problem)
    if prefix == PEFT and ALPHA not in module.parts and _is_own(name, place):
        return Located(module, prefix, name, place, None, own, _NO_CONFIG)
    try:
        return Located(module, prefix, name, place, _matrix(module), own, "")
    except AdapterError as error:
        return Located(module, prefix, name, place, None, own, str(error))


def _matrix(module: ModuleTensors) -> LowRank:
    parts = module.parts
    if len(parts) < sum(end in KNOWN for end in module.tensors):
        raise AdapterError("it has two tensors for one factor")
    matrix = low_rank(parts)
    if MAGNITUDE in parts:
        _magnitude(parts[MAGNITUDE], matrix.shape[0])  # may be of inputs, which is not expressible
    return matrix


def _hint(module: ModuleTensors) -> str:
    is_wide = any(math.prod(tensor.shape[2:]) > 1 for tensor in module.tensors.values())
    return f": {_TAPS}" if is_wide else ""


def _is_own(name: str, place: ModulePlace) -> bool:
    """Whether it is a name that transformers or diffusers gives; others have saved no config."""
    path = place.paths[0]
    return len(place.paths) == 1 and (name.endswith(path) or path.endswith(name))


def _magnitude(stored: StoredTensor, n: int) -> Weight:
    if stored.shape[:1] != (n,) or math.prod(stored.shape) != n:
        raise AdapterError(
            f"{stored.name} has shape {[*stored.shape]}, expected [{n}, 1], a number for each "
            "output: DoRA of inputs is not expressible"
        )

    def read(buffer: ReadBuffer | None = None) -> Array:
        return stored.read(buffer).reshape(n)

    return Weight((stored.name,), (n,), stored.dtype, read)
