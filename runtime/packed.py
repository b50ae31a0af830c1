"""Cast weights into one aligned buffer."""

from collections.abc import Mapping

import numpy as np

from trt_lora.runtime.cast import Caster, Conversion
from trt_lora.runtime.memory import ALIGNMENT, pack
from trt_lora.runtime.tensors import HOST, Tensor
from trt_lora.runtime.weight import Weight


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
    nbytes, layout = pack(wanted, HOST)
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    base = buffer.ctypes.data + -buffer.ctypes.data % ALIGNMENT
    tensors = {
        name: Tensor(base + place.pointer, place.shape, place.dtype, HOST, buffer)
        for name, place in layout.items()
    }

    caster, conversions = Caster(), {}
    for name, weight in weights.items():
        what = f"{source}: {', '.join(weight.names)}"
        conversions[name] = caster.write(weight, dtypes[name], tensors[name].storage(), what)
    return tensors, conversions
