"""Number of kernels that LoRA adds to an engine, by TensorRT's build log; no GPU needed.

The engine's ONNX file is built again, four times: without LoRA, with the plugin, and with native
matrix products, whose ranks are dynamic, as an engine must have them, or fixed. The stacks of an
engine with slots have one rank: three times.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.remove_lora import RemoveLoRA
from trt_lora.builder.progress import Progress
from trt_lora.builder.tensorrt.build_log import Kernel
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX, Flavour, flavour_named
from trt_lora.runtime.manifest import ONNX_FILE, Manifest, Range

Profiles = Mapping[str, Mapping[str, Range]]

PLAIN = "without LoRA"


@dataclass(frozen=True)
class Layout:
    """One way to build an engine, and what it runs."""

    name: str
    kernels: tuple[Kernel, ...]

    def count(self, profile: int) -> int:
        """Return the number of kernels of an optimization profile."""
        return sum(kernel.profile == profile for kernel in self.kernels)

    def pad_copies(self, profile: int) -> int:
        """Return how many of them copy a tensor to pad it."""
        return sum(kernel.is_pad_copy for kernel in self.kernels if kernel.profile == profile)


def with_profile(manifest: Manifest, profile: str | None) -> Manifest:
    """Return the manifest with one of its optimization profiles; None leaves all.

    Raises:
        ConfigError: there is no such profile.
    """
    if profile is None:
        return manifest
    if profile not in manifest.profiles:
        raise ConfigError(f"no profile {profile!r}; this engine has {', '.join(manifest.profiles)}")
    return replace(manifest, profiles={profile: manifest.profiles[profile]})


def kernel_layouts(directory: Path, manifest: Manifest, progress: Progress) -> list[Layout]:
    """Build an engine directory's ONNX file in every layout; `PLAIN` comes first.

    Args:
        directory: the engine's.
        manifest: its manifest; an engine is built for these profiles.
        progress: what is told which layout is built.

    Raises:
        ConfigError: the engine has no profiles, because it was built without TensorRT.
        BackendError: the flavour is not installed.
        ModelError: TensorRT cannot build a layout.
    """
    if not manifest.sites or not manifest.profiles:
        raise ConfigError(f"{directory} has no LoRA sites: there is nothing to compare")
    flavour = TENSORRT_RTX if manifest.flavour == "none" else flavour_named(manifest.flavour)
    return list(_layouts(directory, manifest, flavour, progress))


def _layouts(
    directory: Path, manifest: Manifest, flavour: Flavour, progress: Progress
) -> Iterator[Layout]:
    onnx, rank = directory / ONNX_FILE, manifest.opt_lora_rank
    changes: list[tuple[str, str, Callable[[ir.Model], Profiles]]] = [
        (PLAIN, "native", lambda model: _plain(model, manifest)),
        ("plugin", "plugin", lambda _: manifest.profiles),
    ]
    if manifest.max_loras:
        changes.append(("native, slots", "native", lambda _: manifest.profiles))
    else:
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
        proto = ir.to_proto(model).SerializeToString()
        kernels = Compiler(flavour, progress, lora_plugin).kernels(proto, onnx, profiles)
        yield Layout(name, tuple(kernels))


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
