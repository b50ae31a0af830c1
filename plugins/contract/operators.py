"""Custom ONNX operators of the domain `trt_lora`: one node per group of sites that share x.

LoraDelta2(x, A_1, B_1, A_2, B_2)        -> d_1, d_2      d_i = (x @ A_i) @ B_i
LoraAdd2(x, A_1, B_1, A_2, B_2, c_1, c_2) -> z_1, z_2     z_i = c_i + (x @ A_i) @ B_i

x [..., k], A_i [k, r_i], B_i [r_i, n_i], c_i and outputs [..., n_i]; every site has its own rank.

LoraSlotsDelta2(x, slot, rank, A_1, B_1, A_2, B_2) and LoraSlotsAdd2(.., c_1, c_2) take an adapter
for each token t of x, counted over all its dimensions but the last:

    d_i[t] = (x[t] @ A_i[slot[t]]) @ B_i[slot[t]]         0 where slot[t] is -1, the base model

slot [tokens] int32, A_i [slots, k, R], B_i [slots, R, n_i]; what lies behind an adapter's rank is
zero. rank [slots, sites of the engine] int32 says where that begins, 0 without an adapter. The
attribute `columns` has the column of `rank` of each of the node's sites.

LoraExpertsDelta1(x, slot, rank, A, B) is the same to the kernels: a token of x is what one expert
gets of one token of the model, and `slot` that expert, counted over the experts of all slots. Its
function body is another, for there are many slots, and few tokens take each.
"""

import re
from dataclasses import dataclass, replace

from trt_lora.plugins.contract.sites import MAX_SITES

DOMAIN = "trt_lora"
DOMAIN_VERSION = 1
SLOT_INPUTS = ("slot", "rank")
COLUMNS = "columns"  # attribute of nodes with slots

_NAME = re.compile(r"Lora(?P<slots>Slots|Experts)?(?P<form>Add|Delta)(?P<sites>[1-9]\d*)")


@dataclass(frozen=True)
class Operator:
    """One operator; an ONNX function has a fixed number of inputs, so the name says how many."""

    sites: int
    has_addend: bool  # the delta is added to an existing tensor; otherwise it is returned
    has_slots: bool = False  # A and B are stacks, and every token says which of them it takes
    of_experts: bool = False  # whose slots are experts

    @property
    def name(self) -> str:
        """The ONNX operator type, and the name of the TensorRT plugin."""
        slots = "Experts" if self.of_experts else "Slots" * self.has_slots
        return f"Lora{slots}{'Add' if self.has_addend else 'Delta'}{self.sites}"

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        return len(self.input_names)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in TensorRT's order: x, slot and rank, every A and B, the addends c.

        Those of `SLOT_INPUTS` are integers; all others have the dtype of x.
        """
        sites = range(self.sites)
        factors = (name for site in sites for name in (f"a_{site}", f"b_{site}"))
        addends = (f"c_{site}" for site in sites if self.has_addend)
        return ("x", *(SLOT_INPUTS if self.has_slots else ()), *factors, *addends)

    def factors(self, site: int) -> tuple[int, int]:
        """Return the inputs that are A and B of a site, counted from 0."""
        first = self._first_factor + 2 * site
        return first, first + 1

    def addend(self, site: int) -> int:
        """Return the input [..., n] that the delta of a site is added to."""
        return self._first_factor + 2 * self.sites + site

    @property
    def _first_factor(self) -> int:
        return 1 + len(SLOT_INPUTS) * self.has_slots


OPERATORS = tuple(
    Operator(sites, has_addend) for sites in range(1, MAX_SITES + 1) for has_addend in (False, True)
)
"""Those of an engine for one adapter at a time, which are TensorRT plugins too."""

EXPERTS_OPERATOR = Operator(1, has_addend=False, has_slots=True, of_experts=True)
"""That of experts, in both kinds of engines."""

SLOT_OPERATORS = (
    *(replace(operator, has_slots=True) for operator in OPERATORS),
    EXPERTS_OPERATOR,
)
"""Those that take an adapter for each token, which are TensorRT plugins too."""


def operator_named(name: str) -> Operator | None:
    """Return the operator of an ONNX operator type, or None."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["sites"]) > MAX_SITES:
        return None
    if match["slots"] == "Experts":
        return EXPERTS_OPERATOR if name == EXPERTS_OPERATOR.name else None
    return Operator(int(match["sites"]), match["form"] == "Add", match["slots"] is not None)
