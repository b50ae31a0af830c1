"""Options of an engine that is built from an ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trt_lora.builder.config import DTYPES, FLAVOUR_CHOICES, PLUGIN_CHOICES, check_no_aot_slots
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.plugins.checked import check_choice, check_fields, check_range
from trt_lora.plugins.contract.sites import MAX_RANK, MIN_RANK, BindingNames
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.plugins.tensorrt.flavour import Flavour
from trt_lora.runtime.adapters.formats.diffusion.spellings import COMPONENTS


@short_repr
@dataclass(frozen=True)
class GraphConfig:
    """The options of `build-engine --onnx`, or of a component's folder.

    Raises:
        ConfigError: a value is out of its range, or nothing says which linears take LoRA.
    """

    quantize: ClassVar[str] = "none"  # codes are those that the graph has
    quantize_head: ClassVar[str] = "none"

    # The file, by any exporter, with its external data beside it; or the folder of a denoiser or
    # text encoder of a diffusers pipeline, which is traced.
    onnx: Path
    output: Path  # the engine directory to make
    target_modules: tuple[str, ...] = ()  # ends of paths, or all-linear; empty: as lora_dirs has it
    lora_dirs: tuple[Path, ...] = ()  # adapters the engine must be able to take
    max_lora_rank: int | None = None  # None: the largest of lora_dirs, else DEFAULT_MAX_LORA_RANK
    shapes: tuple[str, ...] = ()  # of symbols, such as batch=1:2:8; see `shapes.py`
    path_prefix: str = ""  # in front of every path that the graph has
    site_map: Path | None = None  # a JSON file of names and widths; see `SiteMap`
    flavour: str = "auto"  # one of FLAVOUR_CHOICES; auto: what is installed, none: no plan
    lora_plugin: str = "auto"  # the plugin where the flavour can, else native matrix products
    binding_names: BindingNames = BindingNames.LORA  # spelling of the LoRA inputs
    compute_capability: tuple[str, ...] = ()  # of GPUs that a plan is for, such as 8.9; empty: any
    timing_cache: Path | None = None  # file of kernel timings; full TensorRT alone has them
    dtype: str = "float16"  # of the weights of a folder; a file has its own
    component: str = ""  # its name in a pipeline, such as text_encoder; empty: it is by itself
    outputs: tuple[str, ...] = ()  # of a folder: those that the engine returns; empty: all
    force: bool = False  # replace an engine that stands at `output`
    max_loras: int = 0  # adapters in one batch, a row each; 0: one for all rows
    batch: str = ""  # name of the dimension that counts rows; empty: see `batch_symbol`

    def __post_init__(self) -> None:
        """Refuse values that cannot be built."""
        check_fields(self)
        if not self.target_modules and not self.lora_dirs:
            raise ConfigError(
                "nothing says which linears take LoRA; pass --lora-target-modules all-linear, ends "
                "of paths such as to_q, or --lora-dir with a real adapter"
            )
        check_range("--max-lora-rank", self.max_lora_rank, MIN_RANK, MAX_RANK)
        check_range("--max-loras", self.max_loras, 0)
        check_no_aot_slots(self.lora_plugin, self.max_loras)
        check_choice("--flavour", self.flavour, FLAVOUR_CHOICES)
        check_choice("--lora-plugin", self.lora_plugin, PLUGIN_CHOICES)
        check_choice("--dtype", self.dtype, DTYPES)
        if self.component:
            check_choice("component", self.component, COMPONENTS)


@dataclass(frozen=True)
class ResolvedGraph:
    """The options, and what was left to choose."""

    config: GraphConfig  # as it was asked for
    lora: ResolvedLoRA
    flavour: Flavour | None  # None: the ONNX file alone
    lora_plugin: str  # what LoRA nodes become in the plan
