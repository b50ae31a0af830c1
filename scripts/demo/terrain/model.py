"""The terrain model: a one-step diffusion model of heights, which its package carries as ONNX.

`adaptive-terrain-diffusion` (MIT) has a UNet of 12 million values that makes a map of 128 x 128
heights of noise, more rugged the greater `difficulty` is.
"""

import shutil
from pathlib import Path

import numpy as np

from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.demo.pypi_wheel import file_of_wheel

REQUIREMENT = "adaptive-terrain-diffusion==0.4.2"
WHEEL_SHA256 = "dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d"
FILE = "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx"
DEFAULT_DIRECTORY = Path("build/terrain")
SIGMA = 80.0  # standard deviation of the noise that the model takes to heights
SIZE = 128


def ensure_terrain_model(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Return the ONNX file in `directory`; fetched if it is not there yet."""
    if not directory.exists():
        wheel = file_of_wheel(REQUIREMENT, WHEEL_SHA256, FILE)
        with wheel as file, publish_directory(directory) as target:
            shutil.copyfile(file, target / "model.onnx")
    return directory / "model.onnx"


def noise(seed: int, difficulty: float) -> dict[str, Array]:
    """Return the inputs of one map: noisy [1, 1, SIZE, SIZE], sigma [1] and difficulty [1]."""
    heights = np.random.default_rng(seed).standard_normal((1, 1, SIZE, SIZE)) * SIGMA
    numbers = {"noisy": heights, "sigma": [SIGMA], "difficulty": [difficulty]}
    return {name: np.asarray(value, np.float32) for name, value in numbers.items()}
