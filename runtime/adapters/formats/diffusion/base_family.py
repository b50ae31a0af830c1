"""Which base model a file says it is for, and which one an engine is of, as far as names tell."""

from collections.abc import Collection, Mapping

_SD1, _SD2 = "Stable Diffusion 1", "Stable Diffusion 2"
_XL, _SD3, _FLUX, _QWEN, _WAN = "SDXL", "Stable Diffusion 3", "Flux", "Qwen-Image", "Wan"

_FIELDS = ("modelspec.architecture", "ss_base_model_version")
_BEGINNINGS = {
    **dict.fromkeys(("stable-diffusion-v1", "sd_v1"), _SD1),
    **dict.fromkeys(("stable-diffusion-v2", "sd_v2"), _SD2),
    **dict.fromkeys(("stable-diffusion-xl", "sdxl"), _XL),
    **dict.fromkeys(("stable-diffusion-3", "sd3"), _SD3),
    "flux": _FLUX,
    "qwen": _QWEN,
    "wan": _WAN,
}
_SIGNS = (  # beginning of a path that the families alone have; the first that is there
    ("single_transformer_blocks.", {_FLUX}),
    ("transformer_blocks.0.img_m", {_QWEN}),
    ("transformer_blocks.0.norm1_context.", {_SD3}),
    ("blocks.0.attn2.", {_WAN}),
    ("down_blocks.0.attentions.", {_SD1, _SD2}),
    ("down_blocks.2.attentions.", {_XL}),
)


def family_of_file(metadata: Mapping[str, str]) -> tuple[str, str]:
    """Return a base model, and what names it; empty where nothing does."""
    for field in _FIELDS:
        value = metadata.get(field, "")
        for beginning, family in _BEGINNINGS.items():
            if value.lower().startswith(beginning):
                return family, f"{field} is {value[:60]!r}"
    return "", ""


def families_of_engine(paths: Collection[str]) -> frozenset[str]:
    """Return the base models that an engine with these paths may be of; empty if unknown."""
    for sign, families in _SIGNS:
        if any(path.startswith(sign) for path in paths):
            return frozenset(families)
    return frozenset()
