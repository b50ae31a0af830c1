"""Linears of SDXL's UNet and of Flux's transformer: paths, k and n, without a model or weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trt_lora.plugins.contract.sites import Site
from trt_lora.scripts.bench.llama import LinearShape

_TEXT = 2048  # width of what cross attention reads
# Folders of transformers in SDXL's UNet: how many, their width, and how many blocks each has.
_SDXL = (
    ("down_blocks.1.attentions", 2, 640, 2),
    ("down_blocks.2.attentions", 2, 1280, 10),
    ("mid_block.attentions", 1, 1280, 10),
    ("up_blocks.0.attentions", 3, 1280, 10),
    ("up_blocks.1.attentions", 3, 640, 2),
)


@dataclass(frozen=True)
class LinearGroups:
    """Groups of linears that read one x, by name."""

    groups: Mapping[str, tuple[LinearShape, ...]]


# Of SDXL at widths of 640 and 1,280, and of Flux.
DENOISERS = LinearGroups(
    {
        "sdxl qkv 640": tuple(LinearShape(f"to_{part}", 640, 640) for part in "qkv"),
        "sdxl ff up 640": (LinearShape("ff.net.0.proj", 640, 5120),),
        "sdxl qkv 1280": tuple(LinearShape(f"to_{part}", 1280, 1280) for part in "qkv"),
        "sdxl ff down 1280": (LinearShape("ff.net.2", 5120, 1280),),
        "flux qkv": tuple(LinearShape(f"to_{part}", 3072, 3072) for part in "qkv"),
        "flux ff up": (LinearShape("ff.net.0.proj", 3072, 12_288),),
        "flux single out": (LinearShape("proj_out", 15_360, 3072),),
        "flux modulation": (LinearShape("norm1.linear", 3072, 18_432),),
    }
)


def sdxl_sites(dtype: str) -> tuple[Site, ...]:
    """Return the 722 linears that kohya trains of SDXL's UNet by default."""
    return tuple(Site(path, k, n, dtype) for path, k, n in _linears())


def _linears() -> Iterator[tuple[str, int, int]]:
    for folder, count, width, blocks in _SDXL:
        for number in range(count):
            path = f"{folder}.{number}"
            for end in ("proj_in", "proj_out"):
                yield f"{path}.{end}", width, width
            for block in range(blocks):
                yield from _block(f"{path}.transformer_blocks.{block}", width)


def _block(path: str, width: int) -> Iterator[tuple[str, int, int]]:
    for attention, read in (("attn1", width), ("attn2", _TEXT)):
        yield f"{path}.{attention}.to_q", width, width
        yield f"{path}.{attention}.to_k", read, width
        yield f"{path}.{attention}.to_v", read, width
        yield f"{path}.{attention}.to_out.0", width, width
    yield f"{path}.ff.net.0.proj", width, 8 * width
    yield f"{path}.ff.net.2", 4 * width, width
