"""Write a PEFT adapter of random values for every linear of Llama-3-8B."""

from pathlib import Path

import numpy as np

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.read_buffer import ReadBuffer
from trt_lora.scripts.bench.gpu.layers.llama_manager import llama_manifest
from trt_lora.scripts.measuring.random_weights import random_values


def write_random_adapter(directory: Path, rank: int, dtype: str, scale: float = 1.0) -> None:
    """Write the directory.

    Args:
        directory: to make.
        rank: of every linear.
        dtype: of the file, `float16` or the like.
        scale: alpha / rank, which loading multiplies B by.
    """
    pool = random_values(dtype)

    def weight(name: str, shape: tuple[int, int], scale: float = 1.0) -> Weight:
        def read(buffer: ReadBuffer | None = None) -> Array:
            return np.resize(pool, shape)

        return Weight((name,), shape, dtype, read, scale)

    pairs = {
        site.path: (weight("A", site.shape("A", rank)), weight("B", site.shape("B", rank), scale))
        for site in llama_manifest(dtype).sites
    }
    save_adapter(Adapter.of_pairs("random", pairs), directory, "peft")
