"""ComfyUI's unet_config of an engine, made from the paths of its modules.

ComfyUI makes its names for diffusers' and kohya's files from it (comfy/utils.py).
"""

import re

from trt_lora.runtime import Manifest


def layout_of(family: str, manifest: Manifest) -> dict[str, object]:
    """Return how many blocks of which kind there are, and the channels of the latent."""
    paths = [*(site.path for site in manifest.sites), *manifest.no_effect]
    shapes = {binding.name: binding.shape for binding in (*manifest.inputs, *manifest.outputs)}
    if family.startswith("Flux"):
        width = next((s.n for s in manifest.sites if s.path.endswith(".attn.to_q")), 0)
        channels = int(shapes["hidden_states"][2]) // 4  # of a patch of 2x2
        return {
            "depth": _count(r"transformer_blocks", paths),
            "depth_single_blocks": _count(r"single_transformer_blocks", paths),
            "hidden_size": width,
            "in_channels": channels,
            "out_channels": int(manifest.outputs[0].shape[2]) // 4,
        }
    first = manifest.inputs[0].shape[1]
    if family == "SD3":
        return {"depth": _count(r"transformer_blocks", paths), "in_channels": first}
    return _unet(paths) | {"in_channels": first}


def _unet(paths: list[str]) -> dict[str, object]:
    blocks = _count(r"(?:down|up)_blocks", paths)
    layers = _count(r"down_blocks\.\d+\.(?:resnets|attentions)", paths)

    def depth(where: str) -> int:
        return _count(rf"{where}\.transformer_blocks", paths)

    down = [
        depth(rf"down_blocks\.{b}\.attentions\.{i}") for b in range(blocks) for i in range(layers)
    ]
    up = [
        depth(rf"up_blocks\.{b}\.attentions\.{i}") for b in range(blocks) for i in range(layers + 1)
    ]
    return {
        "num_res_blocks": [layers] * blocks,
        "channel_mult": [1] * blocks,  # of which ComfyUI's names need the number
        "transformer_depth": down,
        "transformer_depth_output": up[::-1],
        "transformer_depth_middle": depth(r"mid_block\.attentions\.0"),
    }


def _count(pattern: str, paths: list[str]) -> int:
    """How many entries a list of modules has, by the largest number behind its name."""
    number = re.compile(rf"{pattern}\.(\d+)\..+")
    return max((int(m[1]) + 1 for path in paths if (m := number.fullmatch(path))), default=0)
