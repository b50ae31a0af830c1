"""Base model check of an adapter: fingerprint, and target modules of its config."""

from collections.abc import Mapping

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.manifest import Manifest


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


def is_other_base(name: str, manifest: Manifest) -> bool:
    """Return whether the name of a base model is surely not that of the engine's.

    One may be the folder, the other the name on a hub, so one has to hold the other.
    """
    theirs = name.rstrip("/").rpartition("/")[2]
    shorter, longer = sorted((theirs.lower(), manifest.base_model.name.lower()), key=len)
    return shorter not in longer


def find_missing_sites(
    adapter: Adapter, manifest: Manifest, weights: Mapping[str, Weight]
) -> tuple[str, ...]:
    """Return the sites that the adapter's config targets and that no tensor adapts."""
    if adapter.targets is None:
        return ()
    binding = manifest.binding_names.binding
    unadapted = (site.path for site in manifest.sites if binding("A", site.path) not in weights)
    return tuple(path for path in unadapted if adapter.targets(path))
