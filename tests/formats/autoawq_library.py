"""AutoAWQ: words of eight codes, unpacked and dequantised by its packing_utils.py."""

from importlib.metadata import distribution
from pathlib import Path
from runpy import run_path
from typing import Any

from formats.checks import Tensors, Weights, check_fixtures, tensors_of_linears


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint."""
    # The file by itself: importing the package fails with transformers 5.
    file = distribution("autoawq").locate_file("awq/utils/packing_utils.py")
    dequantize = run_path(str(file))["dequantize_gemm"]
    stored = tensors_of_linears(directory)
    return {path: _weight(tensors, dequantize) for path, tensors in stored.items()}


def _weight(tensors: Tensors, dequantize: Any) -> Any:
    words, scales = tensors["qweight"], tensors["scales"].float()  # [k, n / 8], [k / group, n]
    return dequantize(words, tensors["qzeros"], scales, 4, len(words) // len(scales)).T


if __name__ == "__main__":
    check_fixtures("autoawq", read)
