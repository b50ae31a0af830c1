"""A and B of a module, of LoRA as they are, of LyCORIS' kinds as the products that they are.

Every kind that is a matrix of low rank, `up [n, r] @ down [r, k]`, has an exact A and B:

    LoCon, Tucker       up @ (mid x down)                           rank r
    LoHa                (u1 @ d1) * (u2 @ d2)                       rank r * r
    LoKr                kron(u1 @ d1, u2 @ d2)                      rank r1 * r2

because (u1 @ d1) * (u2 @ d2) multiplies columns and rows pairwise, and kron(u1 @ d1, u2 @ d2) is
kron(u1, u2) @ kron(d1, d2). Products are computed in float32, when they are read.
(LyCORIS: https://arxiv.org/abs/2309.14859)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.diffusion.tensor_names import DOWN, MID, UP
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import StoredTensor
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, Float32

_Parts = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class LowRank:
    """The matrix up [n, r] @ down [r, k]."""

    up: Weight
    down: Weight
    divisor: int  # what alpha is divided by; 0: there is no alpha

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]."""
        return self.up.shape[0], self.down.shape[-1]


def low_rank(parts: _Parts) -> LowRank:
    """Return the factors of a module, from its tensors by what each is.

    Raises:
        AdapterError: one is missing, of another kind than the rest, or no matrix.
    """
    kinds = {"lora": _lora, "hada": _loha, "lokr": _lokr}
    names = [name for name in parts if name in (DOWN, UP, MID) or name[:4] in kinds]
    found = {name[:4] if name[:4] in kinds else "lora" for name in names}
    if len(found) != 1:
        what = f"factors of {' and '.join(sorted(found))}" if found else "no factors"
        raise AdapterError(f"it has {what}")
    matrix = kinds[found.pop()]({name: _matrix(parts[name]) for name in names})
    if matrix.up.shape[1] != matrix.down.shape[0]:
        ranks = f"{matrix.up.shape[1]} and {matrix.down.shape[0]}"
        raise AdapterError(f"its two factors have ranks {ranks}")
    return matrix


def _matrix(tensor: StoredTensor) -> Weight:
    if len(tensor.shape) < 2:
        raise AdapterError(f"{tensor.name} has shape {[*tensor.shape]}, expected a matrix")
    return Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read)


def _taken(weights: Mapping[str, Weight], name: str) -> Weight:
    if name not in weights:
        raise AdapterError(f"its {name} is missing")
    return weights[name].flattened()


def _lora(weights: Mapping[str, Weight]) -> LowRank:
    up, down = _taken(weights, UP), _taken(weights, DOWN)
    rank = down.shape[0]
    return LowRank(up, _tucker(weights[MID], down) if MID in weights else down, rank)


def _loha(weights: Mapping[str, Weight]) -> LowRank:
    one, two = (_decomposed(weights, f"hada_w{i}", f"hada_t{i}") for i in (1, 2))
    if one.shape != two.shape:
        raise AdapterError(f"its factors are of matrices {one.shape} and {two.shape}")
    (n, k), rank = one.shape, one.up.shape[1] * two.up.shape[1]
    up = _computed(
        lambda a, b: (a[:, :, None] * b[:, None, :]).reshape(n, rank), (n, rank), one.up, two.up
    )
    down = _computed(
        lambda a, b: (a[:, None, :] * b[None, :, :]).reshape(rank, k), (rank, k), one.down, two.down
    )
    return LowRank(up, down, one.divisor)


def _lokr(weights: Mapping[str, Weight]) -> LowRank:
    one, two = (
        _full(_taken(weights, name))
        if name in weights
        else _decomposed(weights, name, name.replace("w", "t"))
        for name in ("lokr_w1", "lokr_w2")
    )
    up, down = (_kron(a, b) for a, b in ((one.up, two.up), (one.down, two.down)))
    return LowRank(up, down, two.divisor or one.divisor)


def _decomposed(weights: Mapping[str, Weight], name: str, core: str) -> LowRank:
    """`w_a` [n, r] @ `w_b` [r, k]; with a core `w_a` is [r, n], and the core x `w_b` is [r, k]."""
    up, down = _taken(weights, f"{name}_a"), _taken(weights, f"{name}_b")
    if core not in weights:
        return LowRank(up, down, down.shape[0])
    return LowRank(up.transposed(), _tucker(weights[core], down), down.shape[0])


def _full(matrix: Weight) -> LowRank:
    """A matrix [n, k] of full rank, as itself and an identity."""
    n, k = matrix.shape
    side = min(n, k)
    same = _computed(lambda _: np.eye(side, dtype=np.float32), (side, side), matrix)
    return LowRank(matrix, same, 0) if k <= n else LowRank(same, matrix, 0)


def _tucker(core: Weight, down: Weight) -> Weight:
    """[i, j, taps..] x [j, C] -> [i, C * taps]."""
    (i, j, *taps), (rows, channels) = core.shape, down.shape
    if j != rows:
        raise AdapterError(f"{core.names[0]} has shape {[*core.shape]}, expected [.., {rows}, ..]")
    k = channels * int(np.prod(taps))

    def product(core: Float32, down: Float32) -> Float32:
        found: Float32 = np.einsum("ijt,jc->ict", core.reshape(i, j, -1), down).reshape(i, k)
        return found

    weight = _computed(product, (i, k), core, down)
    return replace(weight, in_file=(i, channels, *taps) if taps else None)


def _kron(one: Weight, two: Weight) -> Weight:
    shape = one.shape[0] * two.shape[0], one.shape[1] * two.shape[1]
    return _computed(np.kron, shape, one, two)


def _computed(function: Callable[..., Float32], shape: tuple[int, int], *factors: Weight) -> Weight:
    """What a function makes of factors, in float32, each time that it is read."""

    def read(buffer: ReadBuffer | None = None) -> Array:
        return function(*(factor.values() for factor in factors))

    names = dict.fromkeys(name for factor in factors for name in factor.names)
    return Weight(tuple(names), shape, "float32", read)
