"""ComfyUI's patches as tensors by the names of a file: what reads files takes or refuses them.

A LoraLoader unpacks a file into patches by weight: ("lora", (up, down, alpha, ...)) in old releases
of ComfyUI, an object with `name` and `weights` in newer ones.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Manifest
from trt_lora.runtime.adapters.formats.diffusion.spellings import Spellings
from trt_lora.runtime.adapters.formats.diffusion.transformer_names import original_transformer_names

DENOISER = "diffusion_model."
# By the name of a weight, or (name, (axis, start, length), function).
Patches = Mapping[Any, object]

_ENDS = {  # kind of patch -> the ends of its tensors' names in a file, in ComfyUI's order
    "lora": "lora_up.weight lora_down.weight alpha lora_mid.weight dora_scale reshape_weight",
    "loha": "hada_w1_a hada_w1_b alpha hada_w2_a hada_w2_b hada_t1 hada_t2 dora_scale",
    "lokr": "lokr_w1 lokr_w2 alpha lokr_w1_a lokr_w1_b lokr_w2_a lokr_w2_b lokr_t2 dora_scale",
    "glora": "a1.weight a2.weight b1.weight b2.weight alpha dora_scale",
    "oft": "oft_blocks rescale alpha dora_scale",
    "boft": "oft_blocks rescale alpha dora_scale",
    "diff": "diff",
    "set": "set_weight",
}


class PatchedWeights:
    """The weights of one engine, by ComfyUI's names and parts of them."""

    def __init__(self, manifest: Manifest) -> None:
        """Take what the engine's sites are called."""
        self.manifest = manifest
        paths = [*(site.path for site in manifest.sites), *manifest.no_effect]
        self._spellings = Spellings(paths)
        self._widths = {site.path: site.n for site in manifest.sites}
        self._joined = {place.paths: name for name, place in original_transformer_names(paths)}

    def tensors(self, patches: Patches) -> dict[str, object]:
        """Return the tensors of patches, by the names of a file.

        Raises:
            AdapterError: a patch is of an unknown kind, or of a part that is no module.
        """
        return {
            f"{self._module(key, end)}.{end}": _plain(value)
            for key, patch in patches.items()
            for end, value in parts_of(key, patch)
        }

    def _module(self, key: Any, end: str) -> str:
        """The module of a patch: one of the parts of a fused weight, where the key says which."""
        whole: tuple[Any, ...] = (key,) if isinstance(key, str) else key
        name, span, function = (*whole, None, None)[:3]
        stem = str(name).removesuffix(".bias" if end == "diff_b" else ".weight")
        stem = stem if stem.startswith(DENOISER) else f"text_encoders.{stem}"
        _, _, place = self._spellings.find(stem)
        if place is None or (span is None and function is None):
            return stem  # of which the reader says what it is
        paths = place.paths if span is None else self._between(place.paths, span)
        is_swap = getattr(function, "__name__", "") == "swap_scale_shift" and place.swapped
        own = paths[0] if len(paths) == 1 else self._joined.get(paths)
        if own is None or (function is not None and not is_swap):
            what = f"part {span}" if own is None else f"function {function}"
            raise AdapterError(f"{name}: {what} of this weight is no module of the engine")
        return DENOISER + own

    def _between(self, paths: tuple[str, ...], span: tuple[int, int, int]) -> tuple[str, ...]:
        """The parts whose outputs are those of a span (axis, start, length), exactly."""
        axis, start, length = span
        end, found = 0, list[str]()
        for path in paths:
            begin, end = end, end + self._widths.get(path, 0)
            if axis == 0 and start <= begin and end <= start + length:
                found.append(path)
        is_whole = sum(self._widths.get(path, 0) for path in found) == length
        return tuple(found) if is_whole else ()


def parts_of(key: object, patch: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a patch is made of, by the ends of names in a file.

    Raises:
        AdapterError: it is of an unknown kind.
    """
    if isinstance(patch, tuple):
        kind, values = ("diff", patch) if len(patch) == 1 else patch
    else:
        kind, values = getattr(patch, "name", type(patch).__name__), getattr(patch, "weights", ())
    ends = _ENDS.get(kind, "").split()
    if not ends or len(values) > len(ends):
        raise AdapterError(
            f"{key}: a patch of kind {kind!r} with {len(values)} values is no LoRA or LyCORIS that "
            "an engine takes as an input; apply it to a checkpoint and build an engine of that"
        )
    for end, value in zip(ends, values, strict=False):
        if value is not None:
            yield ("diff_b" if kind == "diff" and str(key).endswith(".bias") else end), value


def _plain(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return np.asarray(value, np.float32) if isinstance(value, float | int | list) else value
