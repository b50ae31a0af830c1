"""Parameters of all experts together in PEFT's files, both ways, in canonical form.

PEFT wraps `experts` once for each of its parameters, so that names do not say which one a tensor is
for: `<path>.base_layer.lora_A.weight` is of the inner wrapper. As PEFT stores them:

    A  [E * r, in]   or [E, r, in]     row e * r + j is column j of expert e's A
    B  [out, r * E]  or [out, r, E]    column j * E + e is row j of expert e's B

Before 0.20, PEFT took the second dimension of a parameter [E, out, in] for its input: A then lies
over the outputs, and B over the inputs.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from trt_lora.plugins.contract.modules import EXPERT_PARAMETERS
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.peft_config import PeftConfig
from trt_lora.runtime.adapters.formats.peft_targets import expert_parameters
from trt_lora.runtime.adapters.weight import Pair, Weight
from trt_lora.runtime.files.safetensors_file import StoredTensor
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array

WRITTEN_AS = "0.21.0"  # the release of PEFT whose order of dimensions is written
_TRUE_INPUTS = 20  # of 0.20, the first release whose A lies over the true input

_KEY = re.compile(
    r"base_model\.model\.(?P<path>(?:.+\.)?experts)(?P<inner>\.base_layer)?"
    r"\.lora_(?P<factor>[AB])\.weight"
)
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})\b.*")


class ExpertTensor(NamedTuple):
    """A tensor of all experts, and what its name says."""

    path: str  # of the experts
    is_inner: bool
    factor: str
    tensor: StoredTensor


def expert_tensor(tensor: StoredTensor) -> ExpertTensor | None:
    """Return a tensor of all experts with what its name says; None of any other."""
    found = _KEY.fullmatch(tensor.name)
    return found and ExpertTensor(found["path"], bool(found["inner"]), found["factor"], tensor)


def expert_weights(
    tensors: Iterable[ExpertTensor], config: PeftConfig, source: str
) -> dict[str, Weight]:
    """Return A [E, k, r] and B [E, r, n] of parameters, named `lora_A_<path>.<parameter>`.

    Raises:
        AdapterError: a factor is missing from its pair, the numbers of experts disagree, or it
            cannot be told which parameter a tensor is for, or which way round it lies.
    """
    factors: dict[str, dict[bool, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    for path, is_inner, factor, tensor in tensors:
        factors[path][is_inner][factor] = tensor
    weights = dict[str, Weight]()
    for path, wrappers in factors.items():
        pairs = [_wrapper(wrappers[place], source) for place in sorted(wrappers, reverse=True)]
        for parameter, wrapper, is_swapped in _parameters(path, pairs, config, source):
            site = f"{path}.{parameter}"
            pair = wrapper.pair(config.rank(site), config.scale(site), is_swapped=is_swapped)
            weights |= zip(BindingNames.LORA.pair(site), pair, strict=True)
    return weights


@dataclass(frozen=True)
class _Wrapper:
    """A and B of one parameter, as they are in the file."""

    a: StoredTensor
    b: StoredTensor
    source: str

    @property
    def sizes(self) -> tuple[int, int]:
        """What PEFT took for the input and the output."""
        return self.a.shape[-1], self.b.shape[0]

    def pair(self, rank: int, scale: float, *, is_swapped: bool) -> Pair:
        """A [E, k, r] and B [E, r, n]; swapped where A lies over the outputs."""
        experts, (width, height) = self._experts(rank), self.sizes
        a, b = (experts, rank, width), (height, rank, experts)
        if is_swapped:
            k_side, n_side = _turned(self.b, b, (2, 0, 1)), _turned(self.a, a, (0, 1, 2))
        else:
            k_side, n_side = _turned(self.a, a, (0, 2, 1)), _turned(self.b, b, (2, 1, 0))
        return k_side, replace(n_side, scale=scale)

    def _experts(self, rank: int) -> int:
        """E, which both say."""
        a = self._count(self.a, self.a.shape[:-1], rank)
        b = self._count(self.b, self.b.shape[:0:-1], rank)
        if a != b:
            raise AdapterError(
                f"{self.source}: {self.a.name} is of {a} experts, {self.b.name} of {b}"
            )
        return a

    def _count(self, tensor: StoredTensor, sizes: tuple[int, ...], rank: int) -> int:
        """E of [E, r] or of the product of both."""
        if len(sizes) == 2 and sizes[1] == rank:
            return sizes[0]
        if len(sizes) == 1 and sizes[0] and sizes[0] % rank == 0:
            return sizes[0] // rank
        raise AdapterError(
            f"{self.source}: {tensor.name} has shape {list(tensor.shape)}, which is no number of "
            f"experts times rank {rank}, as the config says"
        )


def _wrapper(factors: Mapping[str, StoredTensor], source: str) -> _Wrapper:
    a, b = factors.get("A"), factors.get("B")
    if a is None or b is None:
        (left,) = factors.values()
        raise AdapterError(
            f"{source}: {left.name} has no lora_{'B' if b is None else 'A'} beside it"
        )
    for tensor in (a, b):
        if len(tensor.shape) not in (2, 3):
            shape = list(tensor.shape)
            raise AdapterError(f"{source}: {tensor.name} has shape {shape}, expected 2 or 3 sizes")
    return _Wrapper(a, b, source)


def _parameters(
    path: str, wrappers: list[_Wrapper], config: PeftConfig, source: str
) -> Iterator[tuple[str, _Wrapper, bool]]:
    """Yield the parameter of every wrapper, the inner one first, and whether it is swapped."""
    names = expert_parameters(path, config.parameters)
    if len(names) != len(wrappers):
        raise AdapterError(
            f"{source}: its file has {len(wrappers)} parameters of {path}, and target_parameters "
            f"names {', '.join(names) or 'none'} there; save the adapter again"
        )
    if len(wrappers) == 1:
        yield names[0], wrappers[0], _was_swapped(config, wrappers[0])
        return
    found = [
        (order, is_swapped)
        for order in (wrappers, wrappers[::-1])
        for is_swapped in (False, True)
        if _are_gate_up_and_down(*order, is_swapped=is_swapped)
    ]
    if not found:  # for no sizes is there more than one
        sizes = " and ".join(str(list(wrapper.sizes)) for wrapper in wrappers)
        raise AdapterError(
            f"{source}: which of the tensors of {path} are for {' and for '.join(names)} cannot be "
            f"told: their inputs and outputs are {sizes}; save the adapter again"
        )
    ((order, is_swapped),) = found
    yield from ((name, one, is_swapped) for name, one in zip(EXPERT_PARAMETERS, order, strict=True))


def _are_gate_up_and_down(gate_up: _Wrapper, down: _Wrapper, *, is_swapped: bool) -> bool:
    """Whether one makes 2i of h and the other h of i."""
    (k, n), (k_of_down, n_of_down) = (
        wrapper.sizes[::-1] if is_swapped else wrapper.sizes for wrapper in (gate_up, down)
    )
    return n == 2 * k_of_down and k == n_of_down


def _was_swapped(config: PeftConfig, wrapper: _Wrapper) -> bool:
    """Whether a parameter by itself lies the way that PEFT's releases before 0.20 had it."""
    release = _RELEASE.fullmatch(config.peft_version)
    if release is None:
        raise AdapterError(
            f"{wrapper.source}: whether {wrapper.a.name} lies over the inputs of the experts or "
            "over their outputs depends on the release of PEFT, and the config has no "
            "peft_version; add it"
        )
    return (int(release[1]), int(release[2])) < (0, _TRUE_INPUTS)


def _turned(tensor: StoredTensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Weight:
    """The tensor read as `shape`, its axes in another order."""

    def read(buffer: ReadBuffer | None = None) -> Array:
        return tensor.read(buffer).reshape(shape).transpose(order)

    sizes = tuple(shape[axis] for axis in order)
    return Weight((tensor.name,), sizes, tensor.dtype, read)


# ----------------------------------------------------------------------------------------- writing


def stored_experts(pairs: Mapping[str, Pair]) -> dict[str, Weight]:
    """Return the tensors of experts as PEFT stores them, by name; the scale is left out.

    Args:
        pairs: A [E, k, r] and B [E, r, n] by path of the parameter.
    """
    found = dict[str, Weight]()
    for site, (a, b) in pairs.items():
        path, _, parameter = site.rpartition(".")
        is_inner = parameter == EXPERT_PARAMETERS[0] and f"{path}.{EXPERT_PARAMETERS[1]}" in pairs
        prefix = f"base_model.model.{path}{'.base_layer' * is_inner}"
        experts, k, rank = a.shape
        found[f"{prefix}.lora_A.weight"] = _flat(a, (0, 2, 1), (experts * rank, k))
        found[f"{prefix}.lora_B.weight"] = _flat(b, (2, 1, 0), (b.shape[-1], rank * experts))
    return found


def _flat(weight: Weight, order: tuple[int, ...], shape: tuple[int, ...]) -> Weight:
    def read(buffer: ReadBuffer | None = None) -> Array:
        return weight.read(buffer).transpose(order).reshape(shape)

    return replace(weight, shape=shape, read=read, scale=1.0, tensor=None)
