"""Compare the LoRA deltas of an engine with PEFT's, site by site."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.sites import split_at_layer
from trt_lora.runtime.memory.tensor import Tensor
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.terminal.console import print_table

Matrix = npt.NDArray[np.float64]
Factors = tuple[Matrix, Matrix]  # A [k, r], B [r, n], the scale in B; of experts [E, ..]


def engine_factors(adapters: AdapterStore, name: str) -> dict[str, Factors]:
    """Return what an adapter binds, by site; sites with dummies left out."""
    lease = adapters.lease(name)
    try:
        tensors, manifest = lease.loaded.fitted.tensors, adapters.manifest
        pairs = {site.path: manifest.binding_names.pair(site.path) for site in manifest.sites}
        return {
            path: (_values(tensors[a]), _values(tensors[b]))
            for path, (a, b) in pairs.items()
            if a in tensors
        }
    finally:
        adapters.release(lease)


def _values(tensor: Tensor) -> Matrix:
    return np.array(tensor.numpy(), np.float64)


def delta_errors(ours: Mapping[str, Factors], theirs: Mapping[str, Factors]) -> dict[str, float]:
    """Return, for every site that either side adapts, |ours - theirs| / |theirs|.

    The norms are Frobenius norms of A @ B. A site that one side leaves alone has the error 1, or
    infinity where the reference does.
    """
    return {path: _error(ours.get(path), theirs.get(path)) for path in [*theirs, *ours]}


def _error(ours: Factors | None, theirs: Factors | None) -> float:
    size = delta_norm(theirs)
    difference = delta_norm(_difference(ours, theirs))
    if not size:
        return float("inf") if difference else 0.0
    return difference / size


def _difference(ours: Factors | None, theirs: Factors | None) -> Factors | None:
    if ours is None or theirs is None:
        return ours or theirs
    (k, n), (k_of_theirs, n_of_theirs) = (
        (a.shape[:-1], b.shape[:-2] + b.shape[-1:]) for a, b in (ours, theirs)
    )
    if (k, n) != (k_of_theirs, n_of_theirs):
        return np.full((1, 1), np.inf), np.ones((1, 1))
    a = np.concatenate([ours[0], -theirs[0]], axis=-1)
    return a, np.concatenate([ours[1], theirs[1]], axis=-2)


def delta_norm(factors: Factors | None) -> float:
    """Return |A B|, without making the [k, n] product: A = Q R, and Q changes no length."""
    if factors is None:
        return 0.0
    a, b = factors
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.linalg.norm(np.linalg.qr(a, mode="r") @ b))


def print_deltas(errors: Mapping[str, float]) -> None:
    """Print `delta_errors`, a row a layer, a column a module."""
    places = {path: _row_and_column(path) for path in errors}
    columns = list(dict.fromkeys(column for _, column in places.values()))
    cells = {place: f"{errors[path]:.1e}" for path, place in places.items()}
    rows = dict.fromkeys(row for row, _ in places.values())
    print("\nerror of each site's delta, relative to PEFT's")
    print_table(
        ("", *columns), [(row, *(cells.get((row, c), "-") for c in columns)) for row in rows]
    )


def delta_problems(errors: Mapping[str, float], limit: float) -> list[str]:
    """Return a line for every site whose error is beyond the limit."""
    return [
        f"the delta of {path} is off by {error:.2e} of its norm, beyond {limit}"
        for path, error in errors.items()
        if not error <= limit
    ]


def _row_and_column(path: str) -> tuple[str, str]:
    stem, layer, module = split_at_layer(path)
    return "" if layer is None else f"{stem}.{layer}", module
