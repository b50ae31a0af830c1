"""Weights for modules that no output of an engine depends on: ignored, and listed."""

from trt_lora.plugins.contract.sites import parse_binding
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.diffusion.spellings import without_or_with_text_model
from trt_lora.runtime.manifest import Manifest

NO_EFFECT = "no effect: no output of the engine depends on its module"


def without_effect(adapter: Adapter, manifest: Manifest) -> set[str]:
    """Return the names of an adapter's weights that are for such modules."""
    idle = frozenset(manifest.no_effect)
    idle |= {name for path in idle for name in without_or_with_text_model(path)}
    parsed = ((name, parse_binding(name)) for name in adapter.weights if idle)
    return {name for name, at in parsed if at and at[1] in idle}
