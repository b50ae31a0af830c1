"""AWQ: words along n of codes [k, n] and zeros, eight in the order 0 2 4 6 1 3 5 7.

https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py
"""

from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight
from trt_lora.builder.passes.codes.coded_weight import Codes

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of the codes of eight columns


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear.

    Raises:
        ModelError: fields or tensors are not of this format, or contradict each other.
    """
    linear.option("version", ("gemm", "GEMM"), "gemm")
    bits = linear.option("bits", (4,))
    zeros = _columns(linear, "qzeros", bits) if "qzeros" in linear.tensors else None
    return linear.coded(bits, _columns(linear, "qweight", bits), linear.scales("scales").T, zeros)


def _columns(linear: StoredLinear, name: str, bits: int) -> Codes:
    """Codes [n, rows] of words [rows, n / 8]."""
    codes = linear.words(name, bits, 1)
    return codes.reshape(len(codes), -1, len(_PLACES))[:, :, _PLACES].reshape(codes.shape).T


FORMAT = Format(("qweight",), ("qzeros", "scales"), read)
