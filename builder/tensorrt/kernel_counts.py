"""Number of kernels that LoRA adds to an engine, by TensorRT's build log; no GPU needed.

The engine's ONNX file is built again, four times: without LoRA, with the plugin, and with native
matrix products, whose ranks are dynamic, as an engine must have them, or fixed. The stacks of an
engine with slots have one rank: three times.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.remove_lora import RemoveLoRA
from trt_lora.builder.progress import Progress
from trt_lora.builder.tensorrt.build_log import Layout
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.builder.tensorrt.profiles import Profiles
from trt_lora.builder.tensorrt.second_stream import with_second_stream
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX, Flavour, flavour_named
from trt_lora.runtime.manifest import GRAPH, ONNX_FILE, Manifest, Range

PLAIN = "without LoRA"


def kernel_layouts(
    directory: Path, manifest: Manifest, progress: Progress, profile: str | None = None
) -> Iterator[Layout]:
    """Build an engine directory's ONNX file in every layout: `PLAIN`, the plugin, what else it has.

    Args:
        directory: the engine's.
        manifest: its manifest.
        progress: what is told which layout is built.
        profile: the optimization profile to build for; by default all of the manifest.

    Returns:
        Layouts, each built when it is asked for, whose kernels name their profile by its place in
        the manifest.

    Raises:
        ConfigError: the engine has no profiles, because it was built without TensorRT, or not this.
        BackendError: the flavour is not installed.
        ModelError: TensorRT cannot build a layout.
    """
    if not manifest.sites or not manifest.profiles:
        raise ConfigError(f"{directory} has no LoRA sites: there is nothing to compare")
    flavour = TENSORRT_RTX if manifest.flavour == "none" else flavour_named(manifest.flavour)
    if profile is None:
        return _layouts(directory, manifest, flavour, progress)
    if profile not in manifest.profiles:
        raise ConfigError(f"no profile {profile!r}; this engine has {', '.join(manifest.profiles)}")
    alone = replace(manifest, profiles={profile: manifest.profiles[profile]})
    place = list(manifest.profiles).index(profile)
    return (each.moved_to(place) for each in _layouts(directory, alone, flavour, progress))


def _layouts(
    directory: Path, manifest: Manifest, flavour: Flavour, progress: Progress
) -> Iterator[Layout]:
    onnx, rank = directory / ONNX_FILE, manifest.opt_lora_rank
    is_built = manifest.lora_plugin == "plugin"  # else with what it would be built with
    as_plugin = (
        manifest if is_built else with_second_stream(replace(manifest, lora_plugin="plugin"))
    )
    changes: list[tuple[str, str, Callable[[ir.Model], Profiles]]] = [
        (PLAIN, "native", lambda model: _plain(model, manifest)),
        ("plugin", "plugin", lambda _: manifest.profiles),
    ]
    has_experts = any(site.experts for site in manifest.sites)  # which the plugin alone computes
    if manifest.max_loras and not has_experts:
        changes.append(("native, slots", "native", lambda _: manifest.profiles))
    elif not has_experts:
        changes += [
            ("native, dynamic rank", "native", lambda _: manifest.profiles),
            (f"native, rank {rank} fixed", "native", lambda model: _fixed(model, manifest)),
        ]
    for name, lora_plugin, change in changes:
        if lora_plugin == "plugin" and flavour.plugin_obstacle():
            continue
        progress.stage(name)
        model = ir.load(onnx)
        profiles = change(model)
        second = lora_plugin == "plugin" and as_plugin.second_stream
        is_own = manifest.kind != GRAPH
        compiler = Compiler(
            flavour, progress, lora_plugin, second_stream=second, has_own_codes=is_own
        )
        yield Layout(name, tuple(compiler.kernels(model, onnx, profiles)))


def _plain(model: ir.Model, manifest: Manifest) -> Profiles:
    RemoveLoRA(manifest.lora_inputs)(model)
    return {
        profile: {name: r for name, r in ranges.items() if name not in manifest.lora_inputs}
        for profile, ranges in manifest.profiles.items()
    }


def _fixed(model: ir.Model, manifest: Manifest) -> Profiles:
    """Give every LoRA input the rank that the engine is tuned for."""
    shapes = {
        name: site.shape(factor, manifest.opt_lora_rank)
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    for value in model.graph.inputs:
        if value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    fixed = {name: Range(shape, shape, shape) for name, shape in shapes.items()}
    return {profile: {**ranges, **fixed} for profile, ranges in manifest.profiles.items()}
