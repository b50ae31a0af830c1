"""Random inputs of a graph, at the sizes that its plan is tuned for or that are asked for."""

from collections.abc import Iterable

import numpy as np

from trt_lora.builder.graphs.shapes import factor_of, read_shapes
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, listed
from trt_lora.runtime.manifest import Dimension, Manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype


def random_inputs(
    manifest: Manifest, shapes: Iterable[str] = (), seed: int = 0
) -> dict[str, Array]:
    """Return every input of a graph but LoRA's: floats from 0 to 1, and whole numbers 0 and 1.

    The first number of each row is 1: token ids, masks, positions and time steps can be so.

    Args:
        manifest: of the engine.
        shapes: of symbols, such as `batch=2`, instead of what the plan is tuned for.
        seed: other seeds, other values.

    Raises:
        ConfigError: a size is not known, or of no input.
    """
    rng, inputs = np.random.default_rng(seed), dict[str, Array]()
    for name, (dtype, shape) in _shapes(manifest, tuple(shapes)).items():
        if dtype.startswith(("float", "bfloat")):
            values: Array = rng.random(shape)
        else:
            values = rng.integers(0, 2, shape)
            values[..., :1] = 1
        inputs[name] = values.astype(storage_dtype(dtype))
    return inputs


def _shapes(manifest: Manifest, given: tuple[str, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by name."""
    own = [binding for binding in manifest.inputs if binding.name not in manifest.lora_inputs]
    if not given and manifest.profiles:
        (ranges,) = manifest.profiles.values()
        return {b.name: (b.dtype, ranges[b.name].opt) for b in own}
    sizes = {symbol: usual for symbol, (_, usual, _) in read_shapes(given).items()}
    used = [factor_of(size)[1] for b in own for size in b.shape if isinstance(size, str)]
    if missing := [symbol for symbol in dict.fromkeys(used) if symbol not in sizes]:
        raise ConfigError(
            f"nothing says how large {listed(missing)} shall be; pass --shapes "
            f"{' '.join(f'{symbol}=2' for symbol in missing)} with sizes of your own"
        )
    if unknown := [symbol for symbol in sizes if symbol not in used]:
        raise ConfigError(
            f"--shapes {unknown[0]}: no input of the engine has such a size"
            f"{did_you_mean(unknown[0], used)}"
        )

    def size_of(size: Dimension) -> int:
        if isinstance(size, int):
            return size
        times, symbol = factor_of(size)
        return times * sizes[symbol]

    return {b.name: (b.dtype, tuple(map(size_of, b.shape))) for b in own}
