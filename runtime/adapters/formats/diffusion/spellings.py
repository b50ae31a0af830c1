"""Every spelling of an engine's modules, made from its paths and looked up.

Names with underscores for dots are not parsed: `to_out_0` and `time_emb_proj` cannot be told apart.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.diffusion.transformer_names import (
    ModulePlace,
    original_transformer_names,
)
from trt_lora.runtime.adapters.formats.diffusion.unet_names import original_unet_names

DENOISERS = frozenset({"unet", "transformer", "transformer_2"})
COMPONENTS = (*sorted(DENOISERS), "text_encoder", "text_encoder_2", "text_encoder_3")
EVERY = frozenset(COMPONENTS)
PEFT = "base_model.model."

_TEXT_MODEL = "text_model."  # of CLIP: in all files of old, no longer in transformers' paths
_T5 = "encoder.block.0.layer.0.SelfAttention."
_OLD_ATTENTION = ("to_q", "to_k", "to_v", "to_out", "add_k_proj", "add_v_proj")

_PREFIXES = {
    **{f"{component}.": frozenset({component}) for component in COMPONENTS},
    **dict.fromkeys(("diffusion_model.", "model.diffusion_model."), DENOISERS),
    **dict.fromkeys(("lora_unet_", "lora_transformer_"), DENOISERS),
    **dict.fromkeys(("lora_te_", "lora_te1_"), frozenset({"text_encoder"})),
    "lora_te2_": frozenset({"text_encoder_2"}),
    "lora_te3_": frozenset({"text_encoder_3"}),
    "text_encoders.clip_l.transformer.": frozenset({"text_encoder"}),
    "text_encoders.clip_g.transformer.": frozenset({"text_encoder_2"}),
    "text_encoders.t5xxl.transformer.": frozenset({"text_encoder_3"}),
    "lycoris_": EVERY,
    PEFT: EVERY,
}
_LONGEST_FIRST = sorted(_PREFIXES, key=len, reverse=True)


class _Module(Protocol):
    @property
    def prefix(self) -> str: ...
    @property
    def fits(self) -> bool: ...


class Spellings:
    """The modules of one engine by every name that files call them.

    Args:
        paths: of the engine's sites, and of its modules without effect.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = paths
        self._places, clashes = dict[str, ModulePlace](), set[str]()
        for name, place in _spelled(paths):
            for spelling in (name, name.replace(".", "_")):
                if self._places.setdefault(spelling, place) != place:
                    clashes.add(spelling)
        for spelling in clashes - set(paths):  # to be told apart by nobody
            del self._places[spelling]

    def find(self, stem: str) -> tuple[str, str, ModulePlace | None]:
        """Return prefix, name and place of a module of a file; no place where none has its name."""
        if stem in self._places:
            return "", stem, self._places[stem]
        prefix = next(filter(stem.startswith, _LONGEST_FIRST), "")
        name = stem.removeprefix(prefix)
        return prefix, name, self._places.get(name)

    def own(self, asked: str, modules: Iterable[_Module], source: Path) -> frozenset[str]:
        """Return the components that the engine may be; what is of none of them is another's.

        Args:
            asked: a component, or '' for those whose prefixes the fitting modules have.
            modules: of the file.
            source: its path, for messages.

        Raises:
            AdapterError: modules of several components fit.
        """
        if asked:
            is_t5 = any(path.startswith(_T5) for path in self._paths)
            also = {"text_encoder_3"} if asked == "text_encoder_2" and is_t5 else set[str]()
            return frozenset({asked} | also)  # Flux has its T5 second, its trainers third
        kinds = {components_of(module.prefix) for module in modules if module.fits}
        if found := EVERY.intersection(*kinds):
            return found
        names = ", ".join(sorted(frozenset().union(*kinds)))
        raise AdapterError(
            f"{source}: modules of several components fit this engine ({names}); say which it is: "
            "component of load_adapter, --component of convert-adapter, or that of its manifest"
        )


def components_of(prefix: str) -> frozenset[str]:
    """Return the components that a prefix is of."""
    return _PREFIXES.get(prefix, EVERY)


def _spelled(paths: Collection[str]) -> Iterator[tuple[str, ModulePlace]]:
    places = {path: ModulePlace((path,)) for path in paths}
    yield from places.items()
    for path, place in places.items():
        for name in chain(without_or_with_text_model(path), _old(path)):
            yield name, place
    yield from ((name, places[path]) for name, path in original_unet_names(paths))
    yield from original_transformer_names(paths)


def without_or_with_text_model(path: str) -> Iterator[str]:
    """Yield the other name of a module of CLIP's text encoder; transformers 5 has shortened it."""
    if path.startswith(_TEXT_MODEL):
        yield path.removeprefix(_TEXT_MODEL)
    elif path.startswith("encoder.layers."):
        yield _TEXT_MODEL + path


def _old(path: str) -> Iterator[str]:
    """What diffusers called a linear of an attention: `attn1.processor.to_out_lora`."""
    parent, _, name = path.removesuffix(".0").rpartition(".")
    if name in _OLD_ATTENTION:
        yield f"{parent}.processor.{name}_lora"
