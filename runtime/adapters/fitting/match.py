"""Match adapter tensors to engine bindings: both spellings, fused and split modules."""

from collections.abc import Mapping

from trt_lora.plugins.contract.sites import Factor, parse_binding
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.base_check import compare_copies
from trt_lora.runtime.adapters.fitting.fused_modules import map_pairs
from trt_lora.runtime.adapters.weight import Pair, Weight
from trt_lora.runtime.manifest import Manifest


def match_weights(adapter: Adapter, manifest: Manifest) -> tuple[dict[str, Weight], dict[str, str]]:
    """Find the binding of every weight.

    Returns:
        The weights under the engine's names, in pairs; and tensor -> why it has no binding.

    Raises:
        AdapterError: two tensors are for one binding.
    """
    found: list[tuple[str, Weight]] = []
    elsewhere: dict[str, dict[Factor, Weight]] = {}
    same, other = compare_copies(adapter, manifest.base_model.embeddings)
    unexpected_keys = {n: why for n, why in adapter.unusable_keys.items() if n not in same} | other
    for name, weight in adapter.weights.items():
        parsed = parse_binding(name)
        binding = manifest.binding_names.binding(*parsed) if parsed else name
        if name in manifest.lora_bindings or binding in manifest.lora_bindings:
            found.append((name if name in manifest.lora_bindings else binding, weight))
        elif parsed is None:
            unexpected_keys |= dict.fromkeys(weight.names, f"{name!r} is no binding of this engine")
        else:
            elsewhere.setdefault(parsed[1], {})[parsed[0]] = weight
    mapped, reasons = _match_factors(elsewhere, manifest)
    found += mapped
    if len(dict(found)) < len(found):
        raise AdapterError(f"{adapter.source}: two of its tensors are for one binding")
    weights = dict(found)
    return weights, unexpected_keys | reasons | _drop_single_factors(weights, manifest)


def _match_factors(
    factors: Mapping[str, Mapping[Factor, Weight]], manifest: Manifest
) -> tuple[list[tuple[str, Weight]], dict[str, str]]:
    """Map what has no site of its own onto fused or split modules."""
    matrices: dict[str, Pair] = {
        path: (both["A"], both["B"])
        for path, both in factors.items()
        if len(both) == 2 and all(len(weight.shape) == 2 for weight in both.values())
    }
    mapped, why = map_pairs(matrices, manifest.sites)
    names = manifest.binding_names
    found = [item for path, pair in mapped for item in zip(names.pair(path), pair, strict=True)]
    reached = {name for _, weight in found for name in weight.names}
    reasons = {
        name: f"module {path} has no site in this engine{f': {why[path]}' if path in why else ''}"
        for path, both in factors.items()
        for weight in both.values()
        for name in weight.names
        if name not in reached
    }
    return found, reasons


def _drop_single_factors(weights: dict[str, Weight], manifest: Manifest) -> dict[str, str]:
    """Take out every A without its B and the other way round; return why."""
    dropped: dict[str, str] = {}
    for site in manifest.sites:
        a, b = manifest.binding_names.pair(site.path)
        if (a in weights) != (b in weights):
            present, missing = (a, b) if a in weights else (b, a)
            weight = weights.pop(present)
            dropped |= dict.fromkeys(weight.names, f"{missing} is missing from its pair")
    return dropped


def refusal(adapter: Adapter, manifest: Manifest, unexpected_keys: Mapping[str, str]) -> str:
    """Return the message that refuses an adapter for its unbound tensors."""
    modules = sorted({site.path.rsplit(".", 1)[-1] for site in manifest.sites})
    build = f", or build an engine with --lora-dir {adapter.source}" if adapter.owned else ""
    return (
        f"{adapter.source}: {len(unexpected_keys)} of its tensors have no binding: "
        f"{listed([f'{name} ({why})' for name, why in unexpected_keys.items()])}. "
        f"This engine takes LoRA on {', '.join(modules)} of {manifest.base_model.name} "
        f"({len(manifest.sites)} sites). Check that the adapter is for this base model{build}; "
        "strict=False leaves such tensors out"
    )
