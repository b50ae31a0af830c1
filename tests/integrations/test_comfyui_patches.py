"""ComfyUI's patches on an engine are x + strength * scale * B A, or are refused by name."""

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from integrations.conftest import Comfy, Loaded, assert_close, by_rows, delta, factors
from safetensors.torch import save_file
from support.fakes.fake_comfy import LoRAAdapter, load_lora_for_models, unpacked
from support.models.small_pipelines import DEAD, FLUX, TEXT, UNET, WIDTH
from torch import Tensor

from trt_lora.plugins.errors import AdapterError

_INPUT, _OUTPUT = "input_blocks.3.1.transformer_blocks.0", "output_blocks.1.1.transformer_blocks.0"
_DOWN, _UP = (
    f"{side}_blocks.{n}" for side, n in (("down", "1.attentions.0"), ("up", "0.attentions.1"))
)
# By ComfyUI's name: the paths of its outputs in their order.
NAMES = {
    "SDXL": {
        "time_embed.0": ["time_embedding.linear_1"],
        f"{_INPUT}.attn1.to_q": [f"{_DOWN}.transformer_blocks.0.attn1.to_q"],
        f"{_INPUT}.attn2.to_k": [f"{_DOWN}.transformer_blocks.0.attn2.to_k"],
        f"{_INPUT}.attn1.to_out.0": [f"{_DOWN}.transformer_blocks.0.attn1.to_out.0"],
        f"{_OUTPUT}.ff.net.2": [f"{_UP}.transformer_blocks.0.ff.net.2"],
        "middle_block.1.transformer_blocks.0.attn1.to_v": [
            "mid_block.attentions.0.transformer_blocks.0.attn1.to_v"
        ],
    },
    "Flux": {
        "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{n}" for n in "qkv"],
        "double_blocks.0.txt_attn.qkv": [
            f"transformer_blocks.0.attn.add_{n}_proj" for n in "qkv"
        ],
        "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
        "single_blocks.0.linear1": [
            *(f"single_transformer_blocks.0.attn.to_{n}" for n in "qkv"),
            "single_transformer_blocks.0.proj_mlp",
        ],
        "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    },
}  # fmt: skip
SIZES = UNET | FLUX
_OUT = "double_blocks.0.img_attn.proj.weight"
_PROJ = f"diffusion_model.{_OUT}"
Deltas = dict[str, Tensor]


def lora(kind: str, seed: int) -> tuple[dict[str, Tensor], Deltas]:
    """A file by kohya with every module of a denoiser, and what it adds by path."""
    torch.manual_seed(seed)
    file, deltas = dict[str, Tensor](), Deltas()
    for name, paths in NAMES[kind].items():
        parts = factors(WIDTH, sum(SIZES[path] for path in paths))
        stem = f"lora_unet_{name.replace('.', '_')}"
        file |= {f"{stem}.{end}": tensor for end, tensor in parts.items()}
        whole = delta(parts)
        if name.startswith("final"):
            whole = torch.cat(whole.chunk(2)[::-1])
        deltas |= by_rows(whole, paths, SIZES)
    return file, deltas


def patches(kind: str, file: Mapping[str, Tensor], *, old: bool = False) -> dict[Any, Any]:
    """What a LoraLoader makes of it."""
    names = {f"lora_unet_{n.replace('.', '_')}": f"diffusion_model.{n}.weight" for n in NAMES[kind]}
    return unpacked(file, names, old=old)


def expected(loaded: Loaded, *parts: tuple[float, Deltas]) -> Tensor:
    """The denoiser in torch, with the sum of adapters at their strengths."""
    total: Deltas = {}
    for strength, deltas in parts:
        for path, each in deltas.items():
            total[path] = total.get(path, torch.zeros_like(each)) + strength * each
    (model,) = [m for name, m in loaded.models.items() if name in ("unet", "transformer")]
    x, asked = loaded.latent, loaded.asked
    inputs = {"timestep": torch.tensor([0.9, 0.2]), "encoder_hidden_states": asked["context"]}
    if "guidance" not in asked:
        added = {"sample": x, "text_embeds": asked["y"][:, :-6], "time_ids": asked["y"][:, -6:]}
        return model.run(total, **inputs, **added)[0]
    spots = [(r, c) for r in range(x.shape[2] // 2) for c in range(x.shape[3] // 2)]
    tokens = [x[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].flatten(1) for r, c in spots]
    added = {
        "hidden_states": torch.stack(tokens, 1),
        "pooled_projections": asked["y"],
        "img_ids": torch.tensor([[0, r, c] for r, c in spots]).float(),
        "txt_ids": torch.zeros(5, 3),
        "guidance": asked["guidance"],
    }
    (found,) = model.run(total, **inputs, **added)
    picture = torch.empty(x.shape, dtype=torch.float64)
    for number, (r, c) in enumerate(spots):
        square = found[:, number].reshape(2, 4, 2, 2)
        picture[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = square
    return picture


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("old", [False, True])
def test_a_file_that_comfyui_unpacked_is_that_of_our_readers_and_float64(
    comfy: Comfy, kind: str, old: bool
) -> None:
    loaded: Loaded = getattr(comfy, kind.lower())
    weights = {f"diffusion_model.{name}.weight" for name in NAMES[kind]}
    assert weights <= {*loaded.model.model.state_dict()}, "by these ComfyUI finds patches"
    assert_close(loaded.run(loaded.model), expected(loaded))
    file, deltas = lora(kind, seed=1)
    patcher, _ = load_lora_for_models(loaded.model, None, patches(kind, file, old=old), 0.7, 0.0)
    assert_close(loaded.run(patcher), expected(loaded, (0.7, deltas)))
    save_file(file, comfy.models / "loras" / f"{kind}.safetensors")
    stacked, _, told = comfy.nodes.LoraStack().load(loaded.model, f"{kind}.safetensors 0.7")
    assert torch.equal(loaded.run(stacked), loaded.run(patcher))
    assert f"{len(deltas)} of {len(deltas)} sites adapted" in told


def test_clones_have_their_own_strengths_of_one_engine_and_nothing_is_loaded_twice(
    comfy: Comfy,
) -> None:
    loaded, adapters = comfy.flux, comfy.flux.model.model_loras.engines.adapters
    (one, own), (two, other) = (lora("Flux", seed) for seed in (1, 2))
    first, second = patches("Flux", one), patches("Flux", two)
    a, _ = load_lora_for_models(loaded.model, None, first, 0.5, 0.0)
    before, base = adapters.names, loaded.run(loaded.model)
    kept = loaded.run(a)
    b, _ = load_lora_for_models(a, None, second, -0.4, 0.0)
    assert_close(loaded.run(b), expected(loaded, (0.5, own), (-0.4, other)))
    for strength in (0.1, 1.7, 0.0):
        again = patches("Flux", one)  # the node runs again, over the tensors that it has kept
        c, _ = load_lora_for_models(loaded.model, None, again, strength, 0.0)
        assert_close(loaded.run(c), expected(loaded, (strength, own)))
        assert (loaded.model.model_loras.adapter is None) == (strength == 0)
    twice, _ = load_lora_for_models(a, None, first, 0.25, 0.0)
    assert_close(loaded.run(twice), expected(loaded, (0.75, own)))
    assert len(adapters.names) <= len(before) + 2, "the second file, and the blend"
    assert torch.equal(loaded.run(a), kept)
    assert torch.equal(loaded.run(loaded.model), base)
    changed = {k: LoRAAdapter((*p.weights[:2], 4.0, None, None, None)) for k, p in first.items()}
    d, _ = load_lora_for_models(loaded.model, None, changed, 0.5, 0.0)
    assert_close(loaded.run(d), expected(loaded, (1.0, own)))  # twice the alpha: another adapter


def test_adapters_go_with_the_tensors_of_comfyui(comfy: Comfy) -> None:
    adapters = comfy.flux.model.model_loras.engines.adapters
    found, _ = load_lora_for_models(
        comfy.flux.model, None, patches("Flux", lora("Flux", seed=3)[0]), 1.0, 0.0
    )
    name = next(iter(found.strengths))
    assert name in adapters.names
    del found
    gc.collect()
    load_lora_for_models(comfy.flux.model, None, patches("Flux", lora("Flux", 4)[0]), 1.0, 0.0)
    assert name not in adapters.names


def swap_scale_shift(weight: Tensor) -> Tensor:
    """By this name ComfyUI's function is known."""
    return torch.cat(weight.chunk(2)[::-1])


_PARTS: list[tuple[str, Any, Any, list[str]]] = [
    ("double_blocks.0.img_attn.qkv", (0, WIDTH, WIDTH), None, ["transformer_blocks.0.attn.to_k"]),
    ("single_blocks.0.linear1", (0, 48, 64), None, ["single_transformer_blocks.0.proj_mlp"]),
    ("single_blocks.0.linear1", (0, 0, 48), None, NAMES["Flux"]["single_blocks.0.linear1"][:3]),
    ("final_layer.adaLN_modulation.1", None, swap_scale_shift, ["norm_out.linear"]),
]


@pytest.mark.parametrize(("name", "span", "function", "paths"), _PARTS)
def test_a_patch_of_a_part_of_a_fused_weight_is_that_of_its_module(
    comfy: Comfy, name: str, span: Any, function: Any, paths: list[str]
) -> None:
    torch.manual_seed(5)
    parts = factors(WIDTH, sum(FLUX[path] for path in paths))
    key = (f"diffusion_model.{name}.weight", span, *([function] if function else []))
    patcher = comfy.flux.model.clone()
    assert patcher.add_patches(
        unpacked({f"x.{e}": t for e, t in parts.items()}, {"x": key}, old=True)
    ) == [key]
    deltas = by_rows(delta(parts), paths, FLUX)
    found = comfy.flux.run(patcher)
    assert_close(found, expected(comfy.flux, (1.0, deltas)))


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_products_of_lycoris_are_what_they_are_in_full(comfy: Comfy, kind: str) -> None:
    torch.manual_seed(10)
    if kind == "loha":
        factors = [torch.randn(*shape) / 2 for shape in ((WIDTH, 2), (2, WIDTH)) * 2]
        values = (*factors[:2], 3.0, *factors[2:], None, None, None)
        whole = (factors[0] @ factors[1]) * (factors[2] @ factors[3]) * (3.0 / 2)
    else:
        w1, w2_a, w2_b = torch.randn(4, 2) / 2, torch.randn(4, 2) / 2, torch.randn(2, 8) / 2
        values = (w1, None, 3.0, None, None, w2_a, w2_b, None, None)
        whole = torch.kron(w1, w2_a @ w2_b) * (3.0 / 2)
    patcher = comfy.flux.model.clone()
    patcher.add_patches({_PROJ: LoRAAdapter(values, kind)}, -0.6)
    path = "transformer_blocks.0.attn.to_out.0"
    assert_close(comfy.flux.run(patcher), expected(comfy.flux, (-0.6, {path: whole.double()})))


_UP_DOWN = torch.ones(WIDTH, 2), torch.ones(2, WIDTH)
_QKV = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
_CONV = torch.ones(WIDTH, 2, 1, 1), torch.ones(2, WIDTH, 3, 3), None


@pytest.mark.parametrize(
    ("key", "patch", "words"),
    [
        (_OUT, ("diff", (torch.ones(WIDTH, WIDTH),)), "diff .*in full"),
        (_OUT, (torch.ones(WIDTH, WIDTH),), "diff .*in full"),
        (_OUT, ("diff", (torch.ones(2, 2), {"pad_weight": True})), "'diff' with 2 values"),
        (_OUT, ("set", (torch.ones(WIDTH, WIDTH),)), "set_weight"),
        (_OUT, LoRAAdapter((*_UP_DOWN, 1.0, None, torch.ones(WIDTH, 1), None)), "DoRA"),
        (_OUT, LoRAAdapter((*_UP_DOWN, 1.0, None, None, [32, 32])), "shape of the base weight"),
        (_OUT, LoRAAdapter((*_UP_DOWN, *_UP_DOWN, 1.0, None), "glora"), "GLoRA"),
        (_OUT, LoRAAdapter((torch.ones(2, 8, 8), None, 1.0, None), "oft"), "OFT"),
        (_OUT, ("model_as_lora", (torch.ones(2, 2),)), "kind 'model_as_lora'"),
        (_OUT, [(torch.ones(2, 2), None)], "kind 'list'"),
        (_OUT, ("lora", (torch.ones(WIDTH, 20), torch.ones(20, WIDTH), None)), "rank 20"),
        (_OUT, ("lora", (torch.ones(24, 2), torch.ones(2, 24), None)), "other widths"),
        (_OUT.replace("weight", "bias"), ("diff", (torch.ones(WIDTH),)), "diff_b .*to a bias"),
        ("double_blocks.9.img_attn.proj.weight", ("lora", (*_UP_DOWN, None)), "has no site"),
        ("img_in.weight", ("lora", _CONV), "built with --lora-target-modules conv"),
        ((_QKV, (0, 0, 24)), ("lora", (*_UP_DOWN, None)), r"part \(0, 0, 24\)"),
        ((_QKV, (1, 0, WIDTH)), ("lora", (*_UP_DOWN, None)), r"part \(1, 0, 16\)"),
        ((_QKV, (0, 0, WIDTH), abs), ("lora", (*_UP_DOWN, None)), "function <built-in"),
        ((_PROJ, None, swap_scale_shift), ("lora", (*_UP_DOWN, None)), "function <function swap"),
    ],
)  # fmt: skip
def test_what_is_no_input_of_an_engine_is_refused_by_name_and_leaves_the_model(
    comfy: Comfy, key: Any, patch: object, words: str
) -> None:
    patcher = comfy.flux.model.clone()
    name = f"diffusion_model.{key}" if isinstance(key, str) else key
    with pytest.raises(AdapterError, match=words):
        patcher.add_patches({name: patch})
    assert patcher.patches == patcher.strengths == {}


def test_what_changes_weights_is_refused(comfy: Comfy) -> None:
    patcher = comfy.flux.model.clone()
    with pytest.raises(AdapterError, match=r"strength_model 0.5 scales"):
        patcher.add_patches({}, 1.0, 0.5)
    with pytest.raises(AdapterError, match="merge the checkpoints"):
        patcher.get_key_patches()
    with pytest.raises(AdapterError, match="hooks"):
        patcher.add_hook_patches(None, {})


def test_zeros_have_no_effect(comfy: Comfy) -> None:
    patcher = comfy.flux.model.clone()
    bias = _OUT.replace("weight", "bias")
    patcher.add_patches({f"diffusion_model.{bias}": ("diff", (torch.zeros(WIDTH),))})
    assert torch.equal(comfy.flux.run(patcher), comfy.flux.run(comfy.flux.model))


def test_clip_takes_its_own_strength_and_what_no_output_depends_on(comfy: Comfy) -> None:
    torch.manual_seed(6)
    file: dict[str, Tensor] = {}
    names, deltas = {}, {"text_encoder": dict[str, Tensor](), "text_encoder_2": {}}
    for which, (component, letter) in enumerate(zip(deltas, "lg", strict=True), 1):
        for path in (*TEXT, DEAD):
            stem = f"lora_te{which}_{path.replace('.', '_')}"
            parts = factors(WIDTH, WIDTH)
            file |= {f"{stem}.{end}": tensor for end, tensor in parts.items()}
            names[stem] = f"clip_{letter}.transformer.{path}.weight"
            deltas[component] |= {path: 0.4 * delta(parts)} if path in TEXT else {}
    own, (denoiser, added) = unpacked(file, names, old=False), lora("SDXL", seed=8)
    loaded = {**own, **patches("SDXL", denoiser)}
    sdxl = comfy.sdxl
    model, clip = load_lora_for_models(sdxl.model, sdxl.clip, loaded, 0.9, 0.4)
    assert {*names.values()} <= {*clip.cond_stage_model.state_dict()}
    ids = torch.tensor([[ord(letter) % 97 for letter in "a cat"]])
    for each, adds in ((clip, deltas), (sdxl.clip, {component: {} for component in deltas})):
        cond, pooled = each.encode("a cat")
        left, right = (sdxl.models[c].run(adds[c], input_ids=ids) for c in deltas)
        assert_close(cond, torch.cat([left[1], right[1]], -1))
        assert_close(pooled, right[2])
    assert_close(sdxl.run(model), expected(sdxl, (0.9, added)))
    without = sdxl.model.clone()
    assert without.add_patches(own) == []
    assert without.strengths == {}
    with pytest.raises(AdapterError, match="clip_h"):
        sdxl.clip.clone().add_patches({"clip_h.transformer.x.weight": ("lora", (*_UP_DOWN, None))})
