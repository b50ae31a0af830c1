"""Write names.json.gz: modules of real diffusion models, and what diffusers makes of other names.

    pip install diffusers==0.42.1; python make_names.py

`paths` has [path, k, n] of every linear and convolution of a model, on torch's meta device.
`original` has, by a module's original name, the diffusers paths whose outputs are its outputs,
each with the first and the last of them: found by converting B whose rows are numbered.
"""

import gzip
import json
from pathlib import Path

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.loaders import lora_conversion_utils as convert
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

XL = {
    "block_out_channels": (320, 640, 1280),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def clip(kind, width, layers, **more):
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 49408}
    heads = width // 64
    return kind(
        CLIPTextConfig(num_hidden_layers=layers, num_attention_heads=heads, **sizes, **more)
    )


MODELS = {
    "sd15": lambda: UNet2DConditionModel(cross_attention_dim=768),
    "sdxl": lambda: UNet2DConditionModel(**XL),
    "flux": lambda: FluxTransformer2DModel(guidance_embeds=True),
    "sd3": lambda: SD3Transformer2DModel(
        num_layers=24, num_attention_heads=24, joint_attention_dim=4096, out_channels=16,
        caption_projection_dim=1536),
    "qwen": lambda: QwenImageTransformer2DModel(),
    "wan": lambda: WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "clip_l": lambda: clip(CLIPTextModel, 768, 12),
    "clip_g": lambda: clip(CLIPTextModelWithProjection, 1280, 32, projection_dim=1280),
    "t5": lambda: T5EncoderModel(
        T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64,
                 feed_forward_proj="gated-gelu")),
}  # fmt: skip


def sizes(model):
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield [path, module.in_features, module.out_features]
        elif isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            taps = torch.tensor(module.kernel_size).prod().item()
            yield [path, module.in_channels * taps, module.out_channels]


def numbered(name, n, ends=("lora_down.weight", "lora_up.weight")):
    rows = torch.arange(n, dtype=torch.float32)[:, None]
    return {f"{name}.{ends[0]}": torch.ones(1, 4), f"{name}.{ends[1]}": rows}


def places(converted):
    """{path: [first, last]} of every B."""
    found = {}
    for key, value in converted.items():
        if key.endswith(("lora_B.weight", "up.weight")):
            path = key.removeprefix("transformer.").removeprefix("unet.")
            path = path.removesuffix(".lora_B.weight").removesuffix(".lora.up.weight")
            if path.endswith("_lora.up.weight"):
                path = path.removesuffix("_lora.up.weight").replace(".processor", "")
                path += ".0" * path.endswith("to_out")
            found[path] = [int(value[0, 0]), int(value[-1, 0])]
    return found


def unet(name, model):
    """Candidates are spelled by this package; what they are is said by diffusers alone."""
    from trt_lora.runtime.adapters.formats.diffusion.unet_names import original_unet_names

    found = {}
    for original, _ in original_unet_names([path for path, _, _ in sizes(model)]):
        given = numbered("lora_unet_" + original.replace(".", "_"), 2)
        try:
            renamed = convert._maybe_map_sgm_blocks_to_diffusers(given, model.config)
            found[original] = places(convert._convert_non_diffusers_lora_to_diffusers(renamed)[0])
        except Exception as error:
            found[original] = {type(error).__name__: []}
    return found


def flux():
    h, found = 3072, {}
    double = {"img_attn.qkv": 3, "txt_attn.qkv": 3, "img_attn.proj": 1, "txt_attn.proj": 1,
              "img_mlp.0": 4, "img_mlp.2": 1, "txt_mlp.0": 4, "txt_mlp.2": 1, "img_mod.lin": 6,
              "txt_mod.lin": 6}  # fmt: skip
    names = {f"double_blocks.{i}.{n}": w * h for i in (0, 18) for n, w in double.items()}
    names |= {f"single_blocks.{i}.{n}": w * h for i in (0, 37)
              for n, w in {"linear1": 7, "linear2": 1, "modulation.lin": 3}.items()}  # fmt: skip
    names |= {f"{n}.{layer}": h for n in ("time_in", "vector_in", "guidance_in")
              for layer in ("in_layer", "out_layer")}  # fmt: skip
    names |= {"img_in": h, "txt_in": h, "final_layer.linear": 64,
              "final_layer.adaLN_modulation.1": 2 * h}  # fmt: skip
    for name, n in names.items():
        given = numbered("lora_unet_" + name.replace(".", "_"), n)
        found[name] = places(convert._convert_kohya_flux_lora_to_diffusers(given))
    for n, width in (("qkv_lora1", 3), ("qkv_lora2", 3), ("proj_lora1", 1), ("proj_lora2", 1)):
        name = f"double_blocks.3.processor.{n}"
        given = numbered(name, width * h, ("down.weight", "up.weight"))
        found[name] = places(convert._convert_xlabs_flux_lora_to_diffusers(given))
    return found


def sd3(paths):
    """Whole weights with numbered rows, as a checkpoint in one file has them."""
    from trt_lora.runtime.adapters.formats.diffusion.transformer_names import (
        original_transformer_names,
    )

    wide = {path: n for path, _, n in paths}
    names = {name: sum(wide[p] for p in place.paths)
             for name, place in original_transformer_names(list(wide))
             if name.startswith(("joint", "final", "x_", "t_", "y_"))}  # fmt: skip
    given = {
        f"{name}.{end}": torch.arange(n, dtype=torch.float64) + 1e6 * i
        for i, (name, n) in enumerate(names.items())
        for end in ("weight", "bias")
    }
    for extra in ("pos_embed", "context_embedder.weight", "context_embedder.bias"):
        given[extra] = torch.zeros(2)
    out = convert_sd3_transformer_checkpoint_to_diffusers(given)
    found = {name: {} for name in names}
    for key, value in out.items():
        path, number = key.removesuffix(".weight"), int(value.flatten()[0] // 1e6)
        if key.endswith(".weight") and path in wide and path != "context_embedder":
            rows = [int(value[0] - 1e6 * number), int(value[-1] - 1e6 * number)]
            found[[*names][number]][path] = rows
    return found


def wan():
    attention = [f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in "qkvo"]
    found = {}
    for name in [f"blocks.0.{part}" for part in [*attention, "ffn.0", "ffn.2"]]:
        pair = numbered(name, 8, ("lora_A.weight", "lora_B.weight"))
        given = {f"diffusion_model.{end}": value for end, value in pair.items()}
        found[name] = places(convert._convert_non_diffusers_wan_lora_to_diffusers(given))
    return found


def main():
    with torch.device("meta"):
        models = {name: make() for name, make in MODELS.items()}
    paths = {name: list(sizes(model)) for name, model in models.items()}
    original = {name: unet(name, models[name]) for name in ("sd15", "sdxl")}
    original |= {"flux": flux(), "wan": wan(), "sd3": sd3(paths["sd3"])}
    text = json.dumps({"paths": paths, "original": original}, separators=(",", ":"))
    data = gzip.compress(text.encode(), mtime=0)
    Path(__file__).with_name("names.json.gz").write_bytes(data)
    print(len(data), {name: len(found) for name, found in original.items()})


if __name__ == "__main__":
    main()
