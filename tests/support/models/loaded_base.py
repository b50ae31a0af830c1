"""The base model of a build, as it is when the graph is made of it."""

from support.build_progress import Notes

from trt_lora.builder import BuildConfig
from trt_lora.builder.checks.check_model import check_model
from trt_lora.builder.load_base import LoadedBase, load_base
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.builder.resolved_lora import resolve_lora
from trt_lora.plugins.tensorrt.flavour import Flavour


def loaded(config: BuildConfig, flavour: Flavour | None = None) -> LoadedBase:
    """Load it, with its codes."""
    lora = resolve_lora(config)
    build = ResolvedBuild(config, lora, flavour, "native", check_model(config, lora))
    return load_base(build, Notes())
