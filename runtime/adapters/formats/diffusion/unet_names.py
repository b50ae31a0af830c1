"""Names of the original UNet (SD 1 and 2, SDXL), made from the paths of diffusers'.

A block of `input_blocks` is one ResNet with its attention, or a downsampler; so diffusers' block b
is layers + 1 of them, behind the first, which is `conv_in`.
"""

import re
from collections.abc import Collection, Iterator

_FIXED = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_IN_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(
    r"(?P<side>down|up)_blocks\.(?P<block>\d{1,4})\."
    r"(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<layer>\d{1,4})\.(?P<rest>.+)"
)
_MIDDLE = re.compile(r"mid_block\.(?P<kind>resnets|attentions)\.(?P<layer>\d{1,4})\.(?P<rest>.+)")


def original_unet_names(paths: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (original name, path) of every path that the original UNet has."""
    blocks = {path: match for path in paths if (match := _BLOCK.fullmatch(path))}
    size = _entries_of_a_block(blocks.values())
    attentive = {int(m["block"]) for m in blocks.values() if _is_attention(m) and m["side"] == "up"}
    for path in paths:
        if path in _FIXED:
            yield _FIXED[path], path
        elif middle := _MIDDLE.fullmatch(path):
            entry = 1 if middle["kind"] == "attentions" else 2 * int(middle["layer"])
            yield from _named(f"middle_block.{entry}", middle, path)
        elif match := blocks.get(path):
            yield from _in_block(match, size, attentive, path)


def _is_attention(match: re.Match[str]) -> bool:
    return match["kind"] == "attentions"


def _entries_of_a_block(matches: Collection[re.Match[str]]) -> int:
    """Layers + 1: as many as an up block has, where a down block has one layer less."""
    layers = (m for m in matches if m["kind"] in ("resnets", "attentions"))
    return max((int(m["layer"]) + (2 if m["side"] == "down" else 1) for m in layers), default=1)


def _in_block(
    match: re.Match[str], size: int, attentive: Collection[int], path: str
) -> Iterator[tuple[str, str]]:
    block, layer = int(match["block"]), int(match["layer"])
    if match["kind"] == "downsamplers":
        yield f"input_blocks.{(block + 1) * size}.0.op", path
    elif match["kind"] == "upsamplers":
        place = 2 if block in attentive else 1  # behind the ResNet, and its attention
        yield f"output_blocks.{block * size + size - 1}.{place}.conv", path
    else:
        first = block * size + layer
        entry = f"input_blocks.{first + 1}" if match["side"] == "down" else f"output_blocks.{first}"
        yield from _named(f"{entry}.{int(_is_attention(match))}", match, path)


def _named(place: str, match: re.Match[str], path: str) -> Iterator[tuple[str, str]]:
    rest = match["rest"] if _is_attention(match) else _IN_RESNET.get(match["rest"])
    if rest:
        yield f"{place}.{rest}", path
