"""Base model check of an adapter: fingerprint, copied weights, and the name that it gives."""

from collections.abc import Mapping
from functools import partial

from trt_lora.plugins.contract.sites import TRAINED_BIAS
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.peft_config import merge_advice
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.base_weights import EXACT, BaseCopy, BaseWeight
from trt_lora.runtime.files.stored_matrix import bias_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

_NO_HASHES = (
    "; the engine's manifest, of an earlier release, has no hash to compare it with: build it again"
)


def check_fingerprint(adapter: Adapter, manifest: Manifest) -> None:
    """Refuse an adapter that was converted for another base model.

    Raises:
        AdapterError: it was.
    """
    base = manifest.base_model
    if adapter.base_fingerprint not in (None, base.fingerprint):
        raise AdapterError(
            f"{adapter.source} was converted for a base model with fingerprint "
            f"{adapter.base_fingerprint}, this engine was built from {base.name} with "
            f"{base.fingerprint}; convert it for this engine, from the original adapter"
        )


def scaled_base(adapter: Adapter, manifest: Manifest) -> str:
    """Return why an adapter may be of a base whose linears read other x; empty if it is not.

    AWQ divides x by factors: an adapter that was trained on the original would be wrong by the
    factor of each channel, and its shapes agree. So it has to name the engine's base model.
    """
    base = manifest.base_model
    is_own = adapter.base_fingerprint == base.fingerprint
    if not base.scales_x or is_own or _folder(adapter.base_model or "") == base.name.lower():
        return ""
    trained = adapter.base_model and f"names {shown(adapter.base_model)} as its base model"
    return (
        f"the adapter {trained or 'names no base model'}, and the inputs of {base.name} are "
        "divided by factors of each channel: an adapter of the original would be wrong. Rescale it "
        "with: trt-lora convert-adapter IN OUT --format peft --adapter-base ORIGINAL --model BASE"
    )


def compare_copies(
    adapter: Adapter, embeddings: Mapping[str, BaseWeight]
) -> tuple[dict[str, str], dict[str, str]]:
    """Compare the base weights in an adapter's file with the base model's, which PEFT replaces.

    A copy in a 16-bit dtype is compared with the base model's values in that dtype: rounding is no
    training. A bias that was trained with the adapter counts as one, where it is of no site.

    Args:
        adapter: whose copies are read, the first time.
        embeddings: of the manifest.

    Returns:
        Tensor -> why it is passed over; and tensor -> why it cannot be.

    Raises:
        AdapterError: the file changed since the adapter was opened.
    """
    same, other = dict[str, str](), dict[str, str]()
    for name, copy in {**adapter.base_copies, **_biases(adapter)}.items():
        own = embeddings.get(copy.path)
        known = own.sha256 if own and own.shape == copy.shape else {}
        dtype = next((dtype for dtype, sha256 in known.items() if sha256 == copy.sha256), None)
        if dtype is not None:
            rounded = "" if dtype == EXACT else f", rounded to {dtype}"
            same[name] = f"it is a copy of the base model's own {copy.path}{rounded}"
        elif own:
            other[name] = f"{_difference(copy, own)}; {merge_advice(adapter.source)}"
        elif name in adapter.unusable_keys:
            other[name] = adapter.unusable_keys[name] + ("" if embeddings else _NO_HASHES)
        else:
            other[name] = f"it is a bias of no site here; {merge_advice(adapter.source)}"
    return same, other


def _biases(adapter: Adapter) -> dict[str, BaseCopy]:
    """The trained biases as copies of base weights."""
    return {
        weight.names[0]: BaseCopy(bias_of(path), weight.shape, partial(_whole, weight))
        for (kind, path), weight in adapter.vectors.items()
        if kind == TRAINED_BIAS
    }


def _whole(weight: Weight, most: int) -> list[Array]:
    """A vector as the blocks of a copy; it is no longer than one."""
    del most
    return [weight.values()]


def _difference(copy: BaseCopy, own: BaseWeight) -> str:
    if copy.shape != own.shape:
        return f"it has shape {[*copy.shape]}, {copy.path} of the base model {[*own.shape]}"
    return (
        f"it has other values than {copy.path} of the base model: it was trained, or the adapter "
        "is for another base"
    )


def is_other_base(name: str, manifest: Manifest) -> bool:
    """Return whether the name of a base model is surely not that of the engine's.

    One may be the folder, the other the name on a hub, so one has to hold the other.
    """
    shorter, longer = sorted((_folder(name), manifest.base_model.name.lower()), key=len)
    return shorter not in longer


def _folder(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
