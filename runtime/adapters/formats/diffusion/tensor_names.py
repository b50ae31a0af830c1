"""What a tensor of a diffusion adapter holds, by the end of its name."""

from collections.abc import Iterable
from dataclasses import dataclass

from trt_lora.runtime.files.safetensors_file import StoredTensor

DOWN, UP, MID, ALPHA, MAGNITUDE = "down", "up", "mid", "alpha", "magnitude"

_PLAIN = {"lora_A.weight": DOWN, "lora_B.weight": UP}  # which may be names of bindings, too
_FACTORS = {
    f"{behind}{end}.weight": part
    for part, end in ((DOWN, "down"), (UP, "up"))
    for behind in ("lora_", "lora.", "lora_linear_layer.", "")
} | {"lora_A.default.weight": DOWN, "lora_B.default.weight": UP, "lora_mid.weight": MID}
_LYCORIS = {
    *(f"hada_{factor}" for factor in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{factor}" for factor in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
}
_MAGNITUDES = ("dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.weight")
KNOWN = (
    _PLAIN
    | _FACTORS
    | {name: name for name in _LYCORIS}
    | dict.fromkeys(_MAGNITUDES, MAGNITUDE)
    | {ALPHA: ALPHA}
)
"""End of a name -> the part of its module that the tensor is."""

_BIAS = "it is added to a bias, which is no matrix product"
_FULL = "it is added to a weight in full (LyCORIS: full, or a norm), not as two factors"
ADDED = {
    "diff": _FULL,
    "w_norm": _FULL,
    **dict.fromkeys(("diff_b", "b_norm", "lora_B.bias", "lora_up.bias", "lora.up.bias"), _BIAS),
}
"""End of a name -> why no engine takes the tensor, which has no effect where it is all zero."""

REFUSED = (
    dict.fromkeys(("a1.weight", "a2.weight", "b1.weight", "b2.weight"), "it is of GLoRA")
    | dict.fromkeys(("oft_blocks", "oft_diag", "rescale"), "it is of OFT, which turns the weight")
    | {
        "on_input": "it is of IA3, which multiplies what a linear reads or writes",
        "reshape_weight": "it changes the shape of the base weight",
    }
)
"""End of a name -> why no engine takes the tensor."""

_WEIGHT = {"weight": "it is a weight by itself: of IA3, or of the base model"}
_REASONS = ADDED | REFUSED | _WEIGHT
_MOST = 1 + max(name.count(".") for name in (*KNOWN, *_REASONS))


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of one module of a file."""

    stem: str  # what their names begin with
    tensors: dict[str, StoredTensor]  # by the ends of their names

    @property
    def names(self) -> list[str]:
        """The tensors' names."""
        return [tensor.name for tensor in self.tensors.values()]

    @property
    def parts(self) -> dict[str, StoredTensor]:
        """The tensors that an adapter is made of, by what each is."""
        return {KNOWN[end]: tensor for end, tensor in self.tensors.items() if end in KNOWN}


def is_foreign(name: str) -> bool:
    """Return whether a name can only be one of a diffusion adapter's tensors."""
    end = split_name(name)[1]
    return bool(end) and end not in _PLAIN and end not in _WEIGHT


def split_name(name: str) -> tuple[str, str]:
    """Return a module's name in a file, and the end that says what the tensor is; '' if unknown."""
    pieces = name.split(".")
    for count in range(min(_MOST, len(pieces) - 1), 0, -1):
        end = ".".join(pieces[-count:])
        if end in KNOWN or end in _REASONS:
            return ".".join(pieces[:-count]), end
    return name, ""


def modules_of(tensors: Iterable[StoredTensor]) -> list[ModuleTensors]:
    """Return the modules of a file; a tensor whose name says nothing is one by itself."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        stem, end = split_name(tensor.name)
        found.setdefault(stem, {})[end] = tensor
    return [ModuleTensors(stem, ends) for stem, ends in found.items()]


def why_unusable(end: str) -> str:
    """Return why a tensor is no part of an adapter that an engine takes; '' if it is one."""
    if end in KNOWN:
        return ""
    return _REASONS.get(end, "it is no tensor of LoRA or LyCORIS that is known here")
