"""Original names of diffusion transformers: Flux (BFL and xlabs), SD3 and Wan.

A module that diffusers has split, such as qkv, is the paths of its parts in the order of its
outputs.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_Names = Mapping[str, tuple[str, ...]]  # original name -> the parts in diffusers' model


@dataclass(frozen=True)
class ModulePlace:
    """Where a module of a file is in an engine."""

    paths: tuple[str, ...]  # whose outputs follow one another in its own
    swapped: bool = False  # B's halves, scale and shift, are the other way round


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one kind."""

    ours: str  # diffusers' name of their list
    theirs: str
    names: _Names


@dataclass(frozen=True)
class _Family:
    """Models with the same names."""

    sign: str  # what a path of theirs begins with
    blocks: tuple[_Blocks, ...]
    outside: _Names
    swapped_in_last: str = ""  # a module of the last block that is as norm_out is


_QKV, _ADDED_QKV = (tuple(f"attn.{n}" for n in names) for names in (
    ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"),
))  # fmt: skip
_TIME = "time_text_embed.timestep_embedder"
_TEXT = "time_text_embed.text_embedder"
_GUIDANCE = "time_text_embed.guidance_embedder"
_FINAL = {
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}

_FLUX_DOUBLE = {
    "img_attn.qkv": _QKV,
    "txt_attn.qkv": _ADDED_QKV,
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "processor.qkv_lora1": _QKV,
    "processor.qkv_lora2": _ADDED_QKV,
    "processor.proj_lora1": ("attn.to_out.0",),
    "processor.proj_lora2": ("attn.to_add_out",),
}
_FLUX_SINGLE = {
    "linear1": (*_QKV, "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
    "processor.qkv_lora": _QKV,
    "processor.proj_lora": ("proj_out",),
}
_FLUX = _Family(
    "single_transformer_blocks.",
    (
        _Blocks("transformer_blocks", "double_blocks", _FLUX_DOUBLE),
        _Blocks("single_transformer_blocks", "single_blocks", _FLUX_SINGLE),
    ),
    {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": (f"{_TIME}.linear_1",),
        "time_in.out_layer": (f"{_TIME}.linear_2",),
        "vector_in.in_layer": (f"{_TEXT}.linear_1",),
        "vector_in.out_layer": (f"{_TEXT}.linear_2",),
        "guidance_in.in_layer": (f"{_GUIDANCE}.linear_1",),
        "guidance_in.out_layer": (f"{_GUIDANCE}.linear_2",),
        **_FINAL,
    },
)

_WAN_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_WAN_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj"}
_WAN_BLOCK = {
    **{f"self_attn.{theirs}": (f"attn1.{ours}",) for theirs, ours in _WAN_ATTENTION.items()},
    **{
        f"cross_attn.{theirs}": (f"attn2.{ours}",)
        for theirs, ours in (_WAN_ATTENTION | _WAN_IMAGE).items()
    },
    "ffn.0": ("ffn.net.0.proj",),
    "ffn.2": ("ffn.net.2",),
}
_WAN = _Family(
    "condition_embedder.",
    (_Blocks("blocks", "blocks", _WAN_BLOCK),),
    {
        "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
        "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
        "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
        "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
        "time_projection.1": ("condition_embedder.time_proj",),
        "head.head": ("proj_out",),
    },
)

_SD3_BLOCK = {
    "x_block.attn.qkv": _QKV,
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": tuple(f"attn2.to_{part}" for part in "qkv"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.attn.qkv": _ADDED_QKV,
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}
_SD3 = _Family(
    "transformer_blocks.0.attn.add_q_proj",
    (_Blocks("transformer_blocks", "joint_blocks", _SD3_BLOCK),),
    {
        "x_embedder.proj": ("pos_embed.proj",),
        "t_embedder.mlp.0": (f"{_TIME}.linear_1",),
        "t_embedder.mlp.2": (f"{_TIME}.linear_2",),
        "y_embedder.mlp.0": (f"{_TEXT}.linear_1",),
        "y_embedder.mlp.2": (f"{_TEXT}.linear_2",),
        **_FINAL,
    },
    swapped_in_last="norm1_context.linear",
)
_FAMILIES = (_FLUX, _WAN, _SD3)


def original_transformer_names(paths: Collection[str]) -> Iterator[tuple[str, ModulePlace]]:
    """Yield every original name of which all parts are among the paths, with its place."""
    known = frozenset(paths)
    for family in _FAMILIES:
        if any(path.startswith(family.sign) for path in known):
            for name, place in _of(family, known):
                if known.issuperset(place.paths):
                    yield name, place


def _of(family: _Family, paths: Collection[str]) -> Iterator[tuple[str, ModulePlace]]:
    for name, parts in family.outside.items():
        yield name, ModulePlace(parts, swapped=parts == ("norm_out.linear",))
    for blocks in family.blocks:
        number = re.compile(rf"{blocks.ours}\.(\d{{1,4}})\..+")
        numbers = {int(match[1]) for path in paths if (match := number.fullmatch(path))}
        for n in sorted(numbers):
            for name, parts in blocks.names.items():
                swapped = n == max(numbers) and parts == (family.swapped_in_last,)
                place = ModulePlace(tuple(f"{blocks.ours}.{n}.{part}" for part in parts), swapped)
                yield f"{blocks.theirs}.{n}.{name}", place
