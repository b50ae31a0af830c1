"""Stand-ins of the parts of ComfyUI 0.3.64 that its nodes and samplers call of a model.

What they do is what was read there, and tried with ComfyUI's own; they record what they are asked.
"""

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from support.doc_blocks import ROOT

CPU = torch.device("cpu")


class ModelPatcher:
    """Patches by weight; a clone has its own lists of them, and the same model."""

    def __init__(
        self, model: Any, load_device: Any, offload_device: Any, size: int = 0, **options: Any
    ) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches: dict[str, list[Any]] = {}
        self.attachments: dict[str, Any] = {}
        self.patches_uuid, self.is_clip, self.model_options = uuid.uuid4(), False, options

    def clone(self) -> Any:
        n = self.__class__(self.model, self.load_device, self.offload_device)
        n.patches = {key: patches[:] for key, patches in self.patches.items()}
        n.patches_uuid, n.is_clip = self.patches_uuid, self.is_clip
        n.attachments = self.attachments.copy()
        return n

    def set_attachments(self, key: str, attachment: Any) -> None:
        self.attachments[key] = attachment

    def get_attachment(self, key: str) -> Any:
        return self.attachments.get(key)

    def add_patches(
        self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        taken, known = [], self.model.state_dict()
        for k, patch in patches.items():
            key: tuple[Any, ...] = (k,) if isinstance(k, str) else k
            name, (offset, function) = str(key[0]), (*key[1:], None, None)[:2]
            if name in known:
                taken.append(k)
                patched = (strength_patch, patch, strength_model, offset, function)
                self.patches.setdefault(name, []).append(patched)
        self.patches_uuid = uuid.uuid4()
        return taken

    def load(
        self, device_to: Any, lowvram_model_memory: float, force: bool, full_load: bool
    ) -> None:
        self.model.current_weight_patches_uuid = self.patches_uuid

    def partially_load(self) -> None:
        """As load_models_gpu does: what is loaded with these patches is not loaded again."""
        if getattr(self.model, "current_weight_patches_uuid", None) != self.patches_uuid:
            self.load(CPU, 0, False, True)


class LoRAAdapter:
    """What newer releases unpack LoRA into."""

    def __init__(self, weights: tuple[Any, ...], name: str = "lora") -> None:
        self.weights, self.name = weights, name


class BaseModel(torch.nn.Module):
    """Passes all conditions on by name."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model_config, self.diffusion_model, self.asked = config, None, [dict[str, Any]()]

    def apply_model(self, x: Any, t: Any, context: Any, **conditions: Any) -> Any:
        given = {"context": context, "control": None, "transformer_options": {}, **conditions}
        self.asked.append(given)
        model: Any = self.diffusion_model
        return model(x, t, **given)


class _Config:
    """One of comfy.supported_models."""

    def __init__(self, unet_config: Mapping[str, Any]) -> None:
        self.unet_config = dict(unet_config)

    def get_model(self, state_dict: Mapping[str, Any]) -> BaseModel:
        assert self.unet_config["disable_unet_model_creation"]
        return BaseModel(self)


class CLIP:
    """A patcher of text encoders, and a tokenizer."""

    def __init__(self, no_init: bool) -> None:
        assert no_init

    def clone(self) -> Any:
        n: Any = CLIP(no_init=True)
        me: Any = self
        n.patcher, n.cond_stage_model = me.patcher.clone(), me.cond_stage_model
        n.tokenizer, n.layer_idx, n.tokenizer_options = me.tokenizer, me.layer_idx, {}
        n.use_clip_schedule, n.apply_hooks_to_conds = False, None
        return n

    def add_patches(self, patches: Any, strength: float = 1.0) -> Any:
        me: Any = self
        return me.patcher.add_patches(patches, strength)

    def encode(self, text: str, **options: Any) -> tuple[Any, Any]:
        me: Any = self
        me.cond_stage_model.reset_clip_options()
        if options or me.layer_idx:
            me.cond_stage_model.set_clip_options({"layer": me.layer_idx, **options})
        me.patcher.partially_load()
        found: tuple[Any, Any] = me.cond_stage_model.encode_token_weights(me.tokenizer.of(text))
        return found


class ClipTokenWeightEncoder:
    """A token's weight is the share of what an empty prompt lacks."""

    special_tokens: Mapping[str, int]

    def encode_token_weights(self, rows: list[list[tuple[Any, float]]]) -> tuple[Any, Any]:
        length, s = len(rows[0]), self.special_tokens
        begin = [s[name] for name in ("start", "end") if name in s]
        empty = begin + [s["pad"]] * (length - len(begin))
        out, pooled = getattr(self, "encode")([*([t for t, _ in row] for row in rows), empty])  # noqa: B009
        weights = torch.tensor([[w for _, w in row] for row in rows])[..., None]
        out = (out[:-1] - out[-1:]) * weights + out[-1:]
        return out.flatten(0, 1)[None], None if pooled is None else pooled[:1]


class _Tokenizer:
    """Letters by number, for each encoder."""

    keys = "lg"

    def of(self, text: str) -> dict[str, Any]:
        row = [(ord(letter) % 97, 1.0) for letter in text]
        return {key: [row] for key in self.keys}


def unpacked(file: Mapping[str, Any], names: Mapping[str, Any], *, old: bool) -> dict[Any, Any]:
    """What load_lora makes of a file: a patch by each name of a weight that it knows."""
    ends = ("lora_up.weight", "lora_down.weight", "alpha", "lora_mid.weight", "dora_scale")
    found = {}
    for stem, key in names.items():
        values = [file.get(f"{stem}.{end}") for end in ends]
        if values[2] is not None:
            values[2] = values[2].item()
        if values[0] is not None:
            found[key] = ("lora", tuple(values)) if old else LoRAAdapter((*values, None))
    return found


def load_lora_for_models(model: Any, clip: Any, loaded: Any, *strengths: float) -> tuple[Any, Any]:
    """What a LoraLoader does with them: clones, and the same patches for both."""
    found = [each.clone() if each is not None else None for each in (model, clip)]
    for each, strength in zip(found, strengths, strict=True):
        if each is not None:
            each.add_patches(loaded, strength)
    return found[0], found[1]


@contextmanager
def comfyui(models: Path) -> Iterator[Any]:
    """Yield the nodes, loaded by their path as ComfyUI does, over a folder of models."""
    folders: dict[str, list[str]] = {"loras": [str(models / "loras")]}
    management: dict[str, Any] = dict.fromkeys(
        ("get_torch_device", "unet_offload_device"), lambda: CPU
    )
    management |= dict.fromkeys(("text_encoder_device", "text_encoder_offload_device"), lambda: CPU)
    fakes: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.model_patcher": {"ModelPatcher": ModelPatcher},
        "comfy.model_management": management,
        "comfy.supported_models": dict.fromkeys(("SD15", "SDXL", "SD3", "Flux"), _Config),
        "comfy.sd": {"CLIP": CLIP},
        "comfy.sd1_clip": {"ClipTokenWeightEncoder": ClipTokenWeightEncoder},
        "comfy.sdxl_clip": {"SDXLTokenizer": _Tokenizer},
        "folder_paths": {
            "models_dir": str(models),
            "add_model_folder_path": lambda n, path: folders.setdefault(n, []).append(path),
            "get_folder_paths": folders.__getitem__,
            "get_filename_list": lambda n: [p.name for f in folders[n] for p in Path(f).glob("*")],
            "get_full_path": lambda n, name: _full_path(folders[n], name),
        },
    }
    before, spec = set(sys.modules), _spec()
    for name, attributes in fakes.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
        yield sys.modules[spec.name]
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("comfy", "folder_paths", spec.name):
                del sys.modules[name]


def _spec() -> Any:
    return spec_from_file_location(
        "custom_node_trt_lora", ROOT / "integrations" / "comfyui" / "__init__.py"
    )


def _full_path(folders: list[str], name: str) -> str | None:
    return next((str(p) for p in (Path(f, name) for f in folders) if p.is_file()), None)
