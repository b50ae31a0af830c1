"""Is an adapter for this engine's base model? By fingerprint, name, and what its config targets."""

from collections.abc import Iterator, Mapping

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.match import listed
from trt_lora.runtime.weight import Weight


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


def base_warnings(
    adapter: Adapter, manifest: Manifest, missing: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what is suspicious: another name of the base, or sites that are missing."""
    return (*_name_warning(adapter, manifest), *_missing_warning(missing))


def _name_warning(adapter: Adapter, manifest: Manifest) -> Iterator[str]:
    theirs, ours = (adapter.base_model or "").rstrip("/").rpartition("/")[2], manifest.base_model
    shorter, longer = sorted((theirs.lower(), ours.name.lower()), key=len)
    if shorter not in longer:  # one may be the folder, the other the name on a hub
        yield (
            f"the adapter names {adapter.base_model} as its base model, the engine was built from "
            f"{ours.name} ({ours.architecture}); the shapes agree"
        )


def missing_sites(
    adapter: Adapter, manifest: Manifest, weights: Mapping[str, Weight]
) -> tuple[str, ...]:
    """Return the sites that the adapter's config targets and that no tensor adapts."""
    if adapter.targets is None:
        return ()
    binding = manifest.binding_names.binding
    unadapted = (site.path for site in manifest.sites if binding("A", site.path) not in weights)
    return tuple(path for path in unadapted if adapter.targets(path))


def _missing_warning(missing: tuple[str, ...]) -> Iterator[str]:
    if missing:
        yield (
            f"the adapter's config targets {listed(list(missing))}, but its file has no tensors "
            "for them: it may be incomplete"
        )
