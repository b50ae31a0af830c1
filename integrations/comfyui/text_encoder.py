"""CLIP: ComfyUI's text encoders, each of which an engine runs."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Integral
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import torch
from torch import Tensor

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.formats.diffusion.spellings import without_or_with_text_model
from trt_lora.runtime.pipelines.engines import PipelineEngines

from .engine_run import run_engine
from .loras import ModelLoras
from .patcher import LORAS, EnginePatcher, NamedWeights

_LAST, _BEFORE = "last_hidden_state", "hidden_state_2"  # outputs of engines
_CLIP_L = {"start": 49406, "end": 49407, "pad": 49407}
_CLIP_G = _CLIP_L | {"pad": 0}
_T5 = {"end": 1, "pad": 0}
_Encoded = tuple[Tensor, Tensor]  # of the tokens [1, tokens, width], pooled [1, width]


@dataclass(frozen=True)
class Part:
    """One text encoder of a CLIP."""

    component: str
    weights: str  # what ComfyUI's names of its weights begin with
    special_tokens: Mapping[str, int]
    output: str = _LAST  # which the family reads; empty: what is pooled alone


@dataclass(frozen=True)
class Texts:
    """The text encoders of a family, by ComfyUI's keys of their tokens."""

    tokenizer: str  # module and class of ComfyUI's
    parts: Mapping[str, Part]
    joined: Callable[[Mapping[str, _Encoded]], _Encoded]


def _sdxl(found: Mapping[str, _Encoded]) -> _Encoded:
    return _side_by_side(found), found["g"][1]


def _sd3(found: Mapping[str, _Encoded]) -> _Encoded:
    clip, t5 = _side_by_side(found), found["t5xxl"][0]
    clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    return torch.cat([clip, t5], dim=-2), torch.cat([found["l"][1], found["g"][1]], dim=-1)


def _side_by_side(found: Mapping[str, _Encoded]) -> Tensor:
    tokens = min(found[key][0].shape[1] for key in "lg")
    return torch.cat([found[key][0][:, :tokens] for key in "lg"], dim=-1)


_L = Part("text_encoder", "clip_l.transformer.", _CLIP_L)
_L_BEFORE = replace(_L, output=_BEFORE)
_G_BEFORE = Part("text_encoder_2", "clip_g.transformer.", _CLIP_G, _BEFORE)
_T5_THIRD = Part("text_encoder_3", "t5xxl.transformer.", _T5)
_FLUX = Texts(
    "text_encoders.flux.FluxTokenizer",
    {"l": replace(_L, output=""), "t5xxl": replace(_T5_THIRD, component="text_encoder_2")},
    lambda found: (found["t5xxl"][0], found["l"][1]),
)
_TEXTS = {
    "SD15": Texts("sd1_clip.SD1Tokenizer", {"l": _L}, lambda found: found["l"]),
    "SDXL": Texts("sdxl_clip.SDXLTokenizer", {"l": _L_BEFORE, "g": _G_BEFORE}, _sdxl),
    "SD3": Texts(
        "text_encoders.sd3_clip.SD3Tokenizer",
        {"l": _L_BEFORE, "g": _G_BEFORE, "t5xxl": _T5_THIRD},
        _sd3,
    ),
    "Flux": _FLUX,
    "FluxSchnell": _FLUX,
}


def clip_of(engines: PipelineEngines, family: str) -> Any:
    """Return the CLIP of a pipeline's text encoders; None where one of them has no engine."""
    texts = _TEXTS[family]
    if any(part.component not in engines.engines for part in texts.parts.values()):
        return None
    model = EngineTexts(texts, engines)
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model, clip.layer_idx, clip.tokenizer_options = model, None, {}
    clip.use_clip_schedule, clip.apply_hooks_to_conds = False, None
    module, _, name = texts.tokenizer.rpartition(".")
    clip.tokenizer = getattr(import_module(f"comfy.{module}"), name)()
    device = comfy.model_management.text_encoder_device()
    offload = comfy.model_management.text_encoder_offload_device()
    clip.patcher = EnginePatcher(model, load_device=device, offload_device=offload)
    clip.patcher.is_clip = True
    return clip


class EngineTexts(NamedWeights):
    """What ComfyUI calls as the text encoders of a CLIP."""

    def __init__(self, texts: Texts, engines: PipelineEngines) -> None:
        """Take the encoders, which are all there."""
        components = tuple(part.component for part in texts.parts.values())
        loras = ModelLoras(engines, components)
        super().__init__([name for part in texts.parts.values() for name in _names(part, engines)])
        setattr(self, LORAS, loras)
        self.device: Any = None  # that of the text, which ModelPatcher sets
        self.dtypes = {torch.float32}
        self._texts = texts
        self._encoders = {key: EngineEncoder(part, loras) for key, part in texts.parts.items()}

    def encode_token_weights(self, tokens: Mapping[str, Any]) -> _Encoded:
        """Return what is encoded of tokens with their weights, by encoder."""
        found = {
            key: encoder.encode_token_weights(tokens[key])
            for key, encoder in self._encoders.items()
        }
        return self._texts.joined(found)

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """Refuse another layer than the engines give.

        Raises:
            ConfigError: it is asked for.
        """
        for part in self._texts.parts.values():
            own = -2 if part.output == _BEFORE else -1
            if options.get("layer", own) not in (None, own) or "projected_pooled" in options:
                raise ConfigError(
                    f"{options}: the engine of {part.component} gives layer {own} and its pooled "
                    "text (CLIP Set Last Layer needs ComfyUI's own text encoder)"
                )

    def reset_clip_options(self) -> None:
        """Do nothing: there are none."""


class EngineEncoder(comfy.sd1_clip.ClipTokenWeightEncoder):
    """One text encoder; its base class weights the tokens."""

    def __init__(self, part: Part, loras: ModelLoras) -> None:
        """Take which it is, and what is on."""
        self._part, self._loras, self.special_tokens = part, loras, dict(part.special_tokens)

    def encode(self, tokens: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor | None]:
        """Return what is encoded of rows of token ids, and pooled.

        Raises:
            ConfigError: a token is an embedding.
        """
        if not all(isinstance(token, Integral) for row in tokens for token in row):
            raise ConfigError(
                "embedding: textual inversions need ComfyUI's own text encoder; an engine reads "
                "token ids"
            )
        inputs = {"input_ids": torch.tensor(tokens)}
        component = self._part.component
        found = run_engine(self._loras.engines, component, inputs, self._loras.adapter)
        unread = torch.zeros(*inputs["input_ids"].shape, 1)  # where only what is pooled is read
        return found[self._part.output] if self._part.output else unread, found.get("pooled")


def _names(part: Part, engines: PipelineEngines) -> Iterator[str]:
    """ComfyUI's names of the weights that take LoRA, with `text_model.` and without."""
    manifest = engines.engines[part.component].manifest
    for path in (*(site.path for site in manifest.sites), *manifest.no_effect):
        for name in (path, *without_or_with_text_model(path)):
            yield f"{part.weights}{name}.weight"
