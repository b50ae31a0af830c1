"""Cast weights into one aligned host buffer, on several threads if large."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from trt_lora.runtime.adapters.cast import Caster, Conversion
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.memory.host import packed_on_host
from trt_lora.runtime.memory.tensor import Tensor

_MAX_THREADS = 4
_LARGE = 1 << 17  # bytes of a weight, on average; with smaller ones the waiting costs more
_SHARE = 1 << 22  # bytes for each thread, which takes up to half as many as scratch memory


def pack_weights(
    weights: Mapping[str, Weight], dtypes: Mapping[str, str], source: str
) -> tuple[dict[str, Tensor], dict[str, Conversion]]:
    """Return the weights as tensors in host memory, and what each cast changed.

    Args:
        weights: by binding name; matrices.
        dtypes: of the tensors, by the same names.
        source: what messages call the adapter.

    Raises:
        AdapterError: a value is not finite, or leaves the range of its dtype.
    """
    wanted = {name: Tensor(0, weight.shape, dtypes[name]) for name, weight in weights.items()}
    tensors = packed_on_host(wanted)

    def write(names: list[str]) -> dict[str, Conversion]:
        caster, changes = Caster(), {}
        for name in names:
            label = f"{source}: {', '.join(weights[name].names)}"
            out = tensors[name].storage()
            changes[name] = caster.write(weights[name], dtypes[name], out, label)
        return changes

    threads = _threads(sum(tensor.nbytes for tensor in wanted.values()), len(weights))
    if threads == 1:  # memory is cheaper in the thread that is there
        return tensors, write(list(weights))
    shares = [list(weights)[i::threads] for i in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        changes = list(pool.map(write, shares))
    return tensors, {name: change for part in changes for name, change in part.items()}


def _threads(nbytes: int, count: int) -> int:
    """Number of threads worth starting: numpy releases the GIL only while it copies."""
    if nbytes <= count * _LARGE:
        return 1
    return max(1, min(_MAX_THREADS, os.cpu_count() or 1, count, nbytes // _SHARE))
