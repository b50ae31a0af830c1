"""The kinds of files of diffusion adapters: how each is written, and what reads it.

`PYTHONPATH=tests:src python -m support.adapters.diffusion.file_kinds` writes the table of
docs/adapters.md from these rows; what diffusers does was tried with 0.42.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.adapters.diffusion.writing import BARE, KOHYA, OLD, PEFT, Writing
from support.doc_blocks import ROOT

PAGE = ROOT / "docs" / "adapters.md"
_BEGIN, _END = "<!-- file kinds: made by support.adapters.diffusion.file_kinds -->\n", "\n<!-- -->"

_DOWN = "down_blocks.1.attentions.0.transformer_blocks.0"  # of SDXL
_SD15 = "down_blocks.0.attentions.1.transformer_blocks.0"
_DOUBLE, _SINGLE = "transformer_blocks.3", "single_transformer_blocks.5"
_CLIP = "encoder.layers.3"


@dataclass(frozen=True)
class FileKind:
    """A row of the table."""

    title: str
    example: str  # a name of a tensor
    model: str  # of `models.engine`
    write: Callable[[Writing], object]
    ours: str = "read"
    diffusers: str = "read"
    refusal: str = ""  # words of our error


def flat(path: str) -> str:
    return path.replace(".", "_")


def diffusers(w: Writing) -> None:
    w.configure(
        unet__peft_type="LORA",
        unet__r=2,
        unet__lora_alpha=6,
        unet__target_modules=["to_q", "to_k"],
        unet__rank_pattern={"attn1.to_k": 3},
        unet__alpha_pattern={"attn1.to_k": 1},
    )
    for name, scale, rank in (("to_q", 3.0, 2), ("to_k", 1 / 3, 3)):
        path = f"{_DOWN}.attn1.{name}"
        w.add(f"unet.{path}", path, ends=PEFT, scale=scale, rank=rank)


def diffusers_old(w: Writing) -> None:
    w.add(f"unet.{_DOWN}.ff.net.0.proj", f"{_DOWN}.ff.net.0.proj", ends=OLD)
    w.add(f"unet.{_DOWN}.attn1.processor.to_q_lora", f"{_DOWN}.attn1.to_q", ends=BARE)
    w.add(f"unet.{_DOWN}.attn2.processor.to_out_lora", f"{_DOWN}.attn2.to_out.0", ends=BARE)


def kohya(w: Writing) -> None:
    for path in w.sites:
        w.add(f"lora_unet_{flat(path)}", path, alpha=np.float16(1))


def kohya_original(w: Writing) -> None:
    stem, mid = "lora_unet_input_blocks_4_1", "mid_block.attentions.0.transformer_blocks.9"
    w.add(f"{stem}_transformer_blocks_0_attn1_to_q", f"{_DOWN}.attn1.to_q", alpha=np.int64(4))
    w.add(f"{stem}_proj_in", "down_blocks.1.attentions.0.proj_in", alpha=np.float64(1))
    w.add("lora_unet_middle_block_1_transformer_blocks_9_ff_net_2", f"{mid}.ff.net.2")
    w.add("lora_unet_input_blocks_4_0_in_layers_2", "down_blocks.1.resnets.0.conv1", taps=(3, 3))
    w.add("lora_unet_output_blocks_5_2_conv", "up_blocks.1.upsamplers.0.conv", taps=(3, 3))
    w.add("lora_unet_label_emb_0_0", "add_embedding.linear_1")


def kohya_sd15(w: Writing) -> None:
    w.add(f"lora_unet_{flat(_SD15)}_attn1_to_q", f"{_SD15}.attn1.to_q", alpha=np.float32(1))
    w.add("lora_unet_output_blocks_2_1_conv", "up_blocks.0.upsamplers.0.conv", taps=(3, 3))
    w.add("lora_unet_down_blocks_0_attentions_1_proj_in", "down_blocks.0.attentions.1.proj_in",
          alpha=np.float32(1), taps=(1, 1))  # fmt: skip


def clip(w: Writing) -> None:
    for name in ("mlp.fc1", "self_attn.q_proj"):
        stem = f"lora_te1_text_model_{flat(_CLIP)}_{flat(name)}"
        w.add(stem, f"{_CLIP}.{name}", alpha=np.float16(1))


def clip_with_projection(w: Writing) -> None:
    path = f"text_model.{_CLIP}.self_attn.out_proj"
    w.add(f"text_encoder_2.{path.removeprefix('text_model.')}", path, ends=PEFT)


def t5(w: Writing) -> None:
    path = "encoder.block.3.layer.1.DenseReluDense.wi_0"
    w.add(f"lora_te3_{flat(path)}", path, alpha=np.float16(8))


_BFL = {
    "double_blocks.3.img_attn.qkv": [f"{_DOUBLE}.attn.to_{part}" for part in "qkv"],
    "double_blocks.3.txt_attn.qkv": [f"{_DOUBLE}.attn.add_{part}_proj" for part in "qkv"],
    "single_blocks.5.linear1": [
        *(f"{_SINGLE}.attn.to_{part}" for part in "qkv"),
        f"{_SINGLE}.proj_mlp",
    ],
    "single_blocks.5.linear2": [f"{_SINGLE}.proj_out"],
    "img_in": ["x_embedder"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
}


def bfl(w: Writing, prefix: str, ends: tuple[str, str], alpha: object = None) -> None:
    for name, paths in _BFL.items():
        stem = flat(name) if prefix.endswith("_") else name
        w.add(f"{prefix}{stem}", *paths, ends=ends, alpha=alpha)
    w.swap("norm_out.linear")


def xlabs(w: Writing) -> None:
    stem = "double_blocks.3.processor"
    w.add(f"{stem}.qkv_lora1", *_BFL["double_blocks.3.img_attn.qkv"], ends=BARE)
    w.add(f"{stem}.qkv_lora2", *_BFL["double_blocks.3.txt_attn.qkv"], ends=BARE)
    w.add(f"{stem}.proj_lora2", f"{_DOUBLE}.attn.to_add_out", ends=BARE)


def comfy_unet(w: Writing) -> None:
    stem = "diffusion_model.input_blocks.4.1.transformer_blocks.0"
    w.add(f"{stem}.attn1.to_q", f"{_DOWN}.attn1.to_q", alpha=np.float32(1))


def comfy_diffusers(w: Writing) -> None:
    w.add(f"diffusion_model.{_DOUBLE}.attn.to_q", f"{_DOUBLE}.attn.to_q", ends=PEFT)


def ai_toolkit(w: Writing) -> None:
    w.add(f"transformer.{_SINGLE}.proj_out", f"{_SINGLE}.proj_out", ends=PEFT)


def sd3(w: Writing) -> None:
    block, last = "transformer_blocks.3", "transformer_blocks.23.norm1_context.linear"
    qkv = [f"{block}.attn.to_{part}" for part in "qkv"]
    w.add("lora_unet_joint_blocks_3_x_block_attn_qkv", *qkv, alpha=np.float32(1))
    w.add("lora_unet_joint_blocks_23_context_block_adaLN_modulation_1", last)
    w.swap(last)


def wan(w: Writing) -> None:
    w.add("diffusion_model.blocks.7.self_attn.q", "blocks.7.attn1.to_q", ends=PEFT)
    w.add("diffusion_model.blocks.7.ffn.0", "blocks.7.ffn.net.0.proj", ends=PEFT)


def qwen(w: Writing) -> None:
    path = "transformer_blocks.59.img_mlp.net.2"
    w.add(f"lora_unet_{flat(path)}", path, alpha=np.float32(1))


def locon(w: Writing) -> None:
    path = "down_blocks.1.resnets.0.conv1"
    w.add(f"lycoris_{flat(path)}", path, alpha=np.float32(1), taps=(3, 3))


def tucker(w: Writing) -> None:
    path, r = "down_blocks.1.resnets.0.conv1", 3
    site, stem = w.sites[path], f"lora_unet_{flat(path)}"
    down, up, mid = w.random(r, site.k // 9, 1, 1), w.random(site.n, r, 1, 1), w.random(r, r, 3, 3)
    w.tensors |= {f"{stem}.lora_{n}.weight": t for n, t in
                  (("down", down), ("up", up), ("mid", mid))}  # fmt: skip
    w.tensors[f"{stem}.alpha"] = np.array(2, np.float32)
    delta = np.einsum("nm,mjhw,jc->nchw", up[:, :, 0, 0], mid, down[:, :, 0, 0], dtype=np.float64)
    w.expect([path], 2 / r * delta.reshape(site.n, -1))


def loha(w: Writing, rank: int = 3) -> None:
    path = f"{_DOWN}.attn1.to_q"
    site, stem = w.sites[path], f"lora_unet_{flat(path)}"
    halves = []
    for i in (1, 2):
        a, b = w.random(site.n, rank), w.random(rank, site.k)
        w.tensors |= {f"{stem}.hada_w{i}_a": a, f"{stem}.hada_w{i}_b": b}
        halves.append(a.astype(np.float64) @ b)
    w.tensors[f"{stem}.alpha"] = np.array(1, np.float16)
    w.expect([path], halves[0] * halves[1] / rank)


def lokr(w: Writing) -> None:
    path = f"{_DOWN}.attn1.to_q"
    site, stem = w.sites[path], f"lora_unet_{flat(path)}"
    one, a = w.random(2, 5), w.random(site.n // 2, 2)
    b = w.random(2, site.k // 5)
    names = ("lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha")
    values = (one, a, b, np.array(1, np.float32))
    w.tensors |= {f"{stem}.{name}": value for name, value in zip(names, values, strict=True)}
    w.expect([path], np.kron(one.astype(np.float64), a.astype(np.float64) @ b) / 2)


def lokr_full(w: Writing) -> None:
    path = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    site, stem = w.sites[path], f"lora_unet_{flat(path)}"
    w.tensors |= {f"{stem}.lokr_w1": w.random(4, 8),
                  f"{stem}.lokr_w2": w.random(site.n // 4, site.k // 8)}  # fmt: skip


def beside(*names: str) -> Callable[[Writing], None]:
    """A module of LoRA, and other tensors beside its own."""

    def write(w: Writing) -> None:
        path = f"{_DOWN}.attn1.to_q"
        w.add(f"lora_unet_{flat(path)}", path, alpha=np.float32(1))
        for name in names:
            w.tensors[f"lora_unet_{flat(path)}.{name}"] = w.random(w.sites[path].n, 1)

    return write


def unknown(w: Writing) -> None:
    comfy_unet(w)
    w.tensors["lora_unet_down_blocks_9_attentions_0_proj_in.lora_down.weight"] = w.random(2, 10)
    w.tensors["lora_unet_down_blocks_9_attentions_0_proj_in.lora_up.weight"] = w.random(10, 2)


def other_width(w: Writing) -> None:
    stem = f"lora_unet_{flat(_DOWN)}_attn2_to_k"
    w.tensors |= {f"{stem}.{KOHYA[0]}": w.random(2, 12), f"{stem}.{KOHYA[1]}": w.random(10, 2)}


_NOTHING = "loads, **0 factors attached**"
_RENAMED = 'ValueError "not correctly renamed"'
_REFUSED = "refused by name"
_PATH = "down_blocks.1.attentions.0..attn1.to_q"

FILE_KINDS = (
    FileKind("diffusers; alphas in the file's metadata",
             f"unet.{_PATH}.lora_A.weight", "sdxl", diffusers),
    FileKind("diffusers, old", "unet...attn1.processor.to_q_lora.down.weight", "sdxl",
             diffusers_old),
    FileKind("kohya (sd-scripts), all 794 modules",
             "lora_unet_down_blocks_1_attentions_0..to_q.lora_down.weight", "sdxl", kohya,
             diffusers="read, but `add_embedding`, which is renamed wrongly"),
    FileKind("kohya, original names of SDXL",
             "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.lora_down.weight", "sdxl",
             kohya_original),
    FileKind("kohya, SD 1.5", "lora_unet_output_blocks_2_1_conv.lora_down.weight", "sd15",
             kohya_sd15, diffusers="read, but this one, which is renamed wrongly"),
    FileKind("kohya, CLIP-L", "lora_te1_text_model_encoder_layers_3_mlp_fc1.lora_down.weight",
             "clip_l", clip, diffusers="whole layers only, else ValueError"),
    FileKind("diffusers, CLIP-G, `text_model.` left out",
             "text_encoder_2.encoder.layers.3.self_attn.out_proj.lora_A.weight", "clip_g",
             clip_with_projection, diffusers="whole layers only, else ValueError"),
    FileKind("kohya, T5",
             "lora_te3_encoder_block_3_layer_1_DenseReluDense_wi_0.lora_down.weight", "t5", t5,
             diffusers="dropped without a word (Flux)"),
    FileKind("kohya, Flux", "lora_unet_double_blocks_3_img_attn_qkv.lora_down.weight", "flux",
             lambda w: bfl(w, "lora_unet_", KOHYA, np.float16(1)),
             diffusers="read; alphas of `final_layer` are dropped"),
    FileKind("xlabs, Flux", "double_blocks.3.processor.qkv_lora1.down.weight", "flux", xlabs),
    FileKind("ComfyUI, Flux", "diffusion_model.double_blocks.3.img_attn.qkv.lora_A.weight",
             "flux", lambda w: bfl(w, "diffusion_model.", PEFT), diffusers=_NOTHING),
    FileKind("ComfyUI, SDXL", "diffusion_model.input_blocks.4.1...attn1.to_q.lora_down.weight",
             "sdxl", comfy_unet, diffusers=_NOTHING),
    FileKind("ComfyUI's prefix, diffusers' paths",
             "diffusion_model.transformer_blocks.3.attn.to_q.lora_A.weight", "flux",
             comfy_diffusers, diffusers=_NOTHING),
    FileKind("ai-toolkit, Flux", "transformer.single_transformer_blocks.5.proj_out.lora_A.weight",
             "flux", ai_toolkit),
    FileKind("PEFT's prefix, original names",
             "base_model.model.double_blocks.3.img_attn.qkv.lora_A.weight", "flux",
             lambda w: bfl(w, "base_model.model.", PEFT),
             diffusers="KeyError if a block is left out"),
    FileKind("SD3, original names", "lora_unet_joint_blocks_3_x_block_attn_qkv.lora_down.weight",
             "sd3", sd3, diffusers="not tried"),
    FileKind("Wan, original names", "diffusion_model.blocks.7.self_attn.q.lora_A.weight", "wan",
             wan),
    FileKind("Qwen-Image", "lora_unet_transformer_blocks_59_img_mlp_net_2.lora_down.weight", "qwen",
             qwen),
    FileKind("LoCon, 3x3 convolution", "lora_unet_.._conv1.lora_down.weight", "sdxl", locon),
    FileKind("LoCon, Tucker", "lora_unet_.._conv1.lora_mid.weight", "sdxl", tucker,
             ours="folded into A", diffusers=_RENAMED),
    FileKind("LoHa", "lora_unet_.._to_q.hada_w1_a", "sdxl", loha,
             ours="its product, rank r * r", diffusers=_RENAMED),
    FileKind("LoKr", "lora_unet_.._to_q.lokr_w1", "sdxl", lokr,
             ours="its product, rank r1 * r2", diffusers="ValueError"),
    FileKind("LoKr, both factors full", "lora_unet_.._to_q.lokr_w2", "sdxl", lokr_full,
             ours="refused with the rank that it needs", diffusers="ValueError",
             refusal="has rank 20; this engine takes 1 to 16"),
    FileKind("DoRA", "lora_unet_.._to_q.dora_scale", "sdxl", beside("dora_scale"),
             ours=f"{_REFUSED}: no graph takes vectors",
             diffusers="`dora_scale` dropped with a warning, the rest applied",
             refusal="DoRA rescales the base weight"),
    FileKind("full differences, of weights and norms", "lora_unet_.._norm1.diff", "sdxl",
             beside("diff"), ours=f"{_REFUSED}; ignored where all is 0", diffusers=_RENAMED,
             refusal="added to a weight in full"),
    FileKind("biases", "lora_unet_.._to_q.diff_b", "sdxl", beside("diff_b"),
             ours=f"{_REFUSED}; ignored where all is 0", diffusers=_RENAMED,
             refusal="added to a bias"),
    FileKind("OFT, BOFT", "lora_unet_.._to_q.oft_blocks", "sdxl", beside("oft_blocks"),
             ours=_REFUSED, diffusers=_RENAMED, refusal="it is of OFT"),
    FileKind("GLoRA", "lora_unet_.._to_q.a1.weight", "sdxl", beside("a1.weight", "b1.weight"),
             ours=_REFUSED, diffusers=_RENAMED, refusal="it is of GLoRA"),
    FileKind("IA3", "lora_unet_.._to_q.on_input", "sdxl", beside("weight", "on_input"),
             ours=_REFUSED, diffusers=_RENAMED, refusal="IA3"),
    FileKind("a module that the engine has not", "lora_unet_down_blocks_9..lora_down.weight",
             "sdxl", unknown, ours=f"{_REFUSED}; `strict=False` lists it",
             diffusers="the rest is loaded, with a warning", refusal="has no site in this engine"),
    FileKind("another base model's widths", "lora_unet_down_blocks_1.._attn2_to_k.lora_down.weight",
             "sdxl", other_width, ours="refused before a value is read, in one sentence",
             diffusers="RuntimeError of torch", refusal="another base model"),
)  # fmt: skip


def table() -> str:
    rows = [
        f"| {kind.title} | `{kind.example}` | {kind.ours} | {kind.diffusers} |"
        for kind in FILE_KINDS
    ]
    head = ["| file | a name in it | trt-lora | diffusers 0.42 |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def page() -> str:
    """The page with the table in its place."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
