"""Custom ONNX operators of the domain `trt_lora`: one node per group of sites that share x.

LoraDelta2(x, A_1, B_1, A_2, B_2)        -> d_1, d_2      d_i = (x @ A_i) @ B_i
LoraAdd2(x, A_1, B_1, A_2, B_2, c_1, c_2) -> z_1, z_2     z_i = c_i + (x @ A_i) @ B_i

x [..., k], A_i [k, r_i], B_i [r_i, n_i], c_i and outputs [..., n_i]; every site has its own rank.
"""

import re
from dataclasses import dataclass

from trt_lora.plugins.contract.sites import MAX_SITES

DOMAIN = "trt_lora"
DOMAIN_VERSION = 1

_NAME = re.compile(r"Lora(?P<form>Add|Delta)(?P<sites>[1-9]\d*)")


@dataclass(frozen=True)
class Operator:
    """One operator; an ONNX function has a fixed number of inputs, so the name says how many."""

    sites: int
    has_addend: bool  # the delta is added to an existing tensor; otherwise it is returned

    @property
    def name(self) -> str:
        """The ONNX operator type, and the name of the TensorRT plugin."""
        return f"Lora{'Add' if self.has_addend else 'Delta'}{self.sites}"

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return 1 + (3 if self.has_addend else 2) * self.sites

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in TensorRT's order: x, every A and B, the addends c."""
        sites = range(self.sites)
        factors = (name for site in sites for name in (f"a_{site}", f"b_{site}"))
        return ("x", *factors, *(f"c_{site}" for site in sites if self.has_addend))

    def factors(self, site: int) -> tuple[int, int]:
        """Return the inputs that are A [k, r] and B [r, n] of a site, counted from 0."""
        return 1 + 2 * site, 2 + 2 * site

    def addend(self, site: int) -> int:
        """Return the input [..., n] that the delta of a site is added to."""
        return 1 + 2 * self.sites + site


OPERATORS = tuple(
    Operator(sites, has_addend) for sites in range(1, MAX_SITES + 1) for has_addend in (False, True)
)


def operator_named(name: str) -> Operator | None:
    """Return the operator of an ONNX operator type, or None."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["sites"]) > MAX_SITES:
        return None
    return Operator(int(match["sites"]), match["form"] == "Add")
