"""Build configuration; the one place of every default."""

from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.checked import check_choice, check_fields, check_range
from trt_lora.plugins.contract.modules import EMBEDDING, HEAD
from trt_lora.plugins.contract.sites import MAX_RANK, MIN_RANK, BindingNames
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.manifest import LORA_MODES, LORA_PLUGINS, SINGLE, SLOTTED

DTYPES = ("float16", "bfloat16", "float32")
FLAVOUR_CHOICES = ("auto", "tensorrt", "tensorrt-rtx", "none")
PLUGIN_CHOICES = ("auto", *LORA_PLUGINS)
DEFAULT_MAX_LORA_RANK = 64
DEFAULT_MAX_INPUT_LEN = 1024
DEFAULT_MAX_SEQ_LEN = 2048
DEFAULT_MAX_SOURCE_LEN = 1024
DEFAULT_MAX_LORAS = 8  # of --lora-mode slots
LORA_MODE_CHOICES = ("auto", *LORA_MODES)
QUANTIZED_BITS = {"none": 0, "int8": 8, "int4": 4, "fp8": 8}  # of a code
SAVED_MODULES = (HEAD, EMBEDDING)
QUANTIZED_HEADS = ("none", "int8", "int4")
CALIBRATED = ("int4", "fp8")  # by a text
FLOAT8_SINCE = 8.9  # the first compute capability that reads FP8
NVFP4_SINCE = 10.0  # and NVFP4
QUANTIZE_BLOCKS = (16, 32, 64, 128, 256)
QUANTIZE_LEVELS = ("fast", "exact")


@short_repr
@dataclass(frozen=True)
class BuildConfig:
    """The options of `build-engine`.

    Raises:
        ConfigError: a value is out of its range, or nothing says which modules take LoRA.
    """

    model: Path  # directory of a transformers language model
    output: Path  # the engine directory to make
    target_modules: tuple[str, ...] = ()  # empty: those that the adapters in lora_dirs have
    lora_dirs: tuple[Path, ...] = ()  # adapters the engine must be able to take
    max_lora_rank: int | None = None  # None: the largest of lora_dirs, else DEFAULT_MAX_LORA_RANK
    lora_mode: str = "auto"  # one of LORA_MODE_CHOICES; auto: slots where max_loras is given
    max_loras: int = 0  # adapters in one batch, a row each; 0: one for all rows, in slots mode 8
    max_batch_size: int = 8  # sequences at a time
    max_input_len: int | None = None  # tokens of a prompt; None: as choose_lengths has it
    max_seq_len: int | None = None  # tokens of prompt and answer together; None: likewise
    dtype: str = "float16"  # of weights and activations, one of DTYPES
    flavour: str = "auto"  # one of FLAVOUR_CHOICES; auto: what is installed, none: no plan
    lora_plugin: str = "auto"  # the plugin where the flavour can, else native matrix products
    lora_streams: int = 2  # of a plan: 2 lets our nodes run beside the products they add to
    binding_names: BindingNames = BindingNames.LORA  # spelling of the LoRA inputs
    compute_capability: tuple[str, ...] = ()  # of GPUs that a plan is for, such as 8.9; empty: any
    timing_cache: Path | None = None  # file of kernel timings; full TensorRT alone has them
    quantize: str = "none"  # codes of the linears' weights, one of QUANTIZED_BITS
    quantize_head: str = "int8"  # of the output head's, where the linears have codes
    quantize_block: int = 32  # values along k that share a scale, one of QUANTIZE_BLOCKS
    quantize_level: str = "fast"  # x in 8 bits, in a plan of FP8 alone; exact: x as it is
    calibration: Path | None = None  # a text for 4 bits and FP8; None: the package's own
    lora_vectors: bool = False  # whether sites take a scale and a bias too: DoRA, lora_bias
    lora_saved_modules: tuple[str, ...] = ()  # that adapters may have whole, of SAVED_MODULES
    max_source_len: int | None = None  # tokens of an encoder-decoder's source; None: 1024 at most
    force: bool = False  # replace an engine that stands at `output`

    def __post_init__(self) -> None:
        """Refuse values that cannot be built."""
        check_fields(self)
        if not self.target_modules and not self.lora_dirs:
            raise ConfigError(
                "nothing says which modules take LoRA; pass --lora-target-modules attn_q attn_v, "
                "all-linear, or --lora-dir with a real adapter"
            )
        check_range("--max-lora-rank", self.max_lora_rank, MIN_RANK, MAX_RANK)
        check_range("--max-loras", self.max_loras, 0)
        self._choose_slots()
        check_range("--max-batch-size", self.max_batch_size, 1)
        check_range("--max-seq-len", self.max_seq_len, 2)
        check_range("--max-input-len", self.max_input_len, 1)
        check_range("--max-source-len", self.max_source_len, 2)
        self._check_that_prompts_fit()
        check_choice("--dtype", self.dtype, DTYPES)
        check_choice("--flavour", self.flavour, FLAVOUR_CHOICES)
        check_choice("--lora-plugin", self.lora_plugin, PLUGIN_CHOICES)
        check_range("--lora-streams", self.lora_streams, 1, 2)
        check_no_aot_slots(self.lora_plugin, self.max_loras)
        self._check_that_names_tell_vectors()
        self._check_codes()
        self._check_saved_modules()

    def _choose_slots(self) -> None:
        check_choice("--lora-mode", self.lora_mode, LORA_MODE_CHOICES)
        if self.lora_mode == SINGLE and self.max_loras:
            raise ConfigError(
                f"--lora-mode single is one adapter for all rows, and --max-loras is "
                f"{self.max_loras}; leave out one of them"
            )
        if self.lora_mode == SLOTTED and not self.max_loras:
            object.__setattr__(self, "max_loras", DEFAULT_MAX_LORAS)

    def _check_that_prompts_fit(self) -> None:
        prompt, total = self.max_input_len, self.max_seq_len
        if prompt is not None and total is not None and prompt > total:
            raise ConfigError(
                f"--max-input-len is {prompt}, but --max-seq-len, which counts the prompt too, is "
                f"{total}; lower the one or raise the other"
            )

    def _check_that_names_tell_vectors(self) -> None:
        if self.lora_vectors and self.binding_names is BindingNames.EDGELLM:
            raise ConfigError(
                "--binding-names edgellm is for TensorRT-Edge-LLM's runtime, which binds A and B "
                "alone; leave out --lora-vectors, or take --binding-names lora"
            )

    def _check_saved_modules(self) -> None:
        for name in self.lora_saved_modules:
            check_choice("--lora-saved-modules", name, SAVED_MODULES)
        wanted = f"--lora-saved-modules {' '.join(self.lora_saved_modules)}"
        if self.lora_saved_modules and self.max_loras:
            raise ConfigError(
                f"{wanted} is for one adapter at a time: with --max-loras {self.max_loras}, each "
                "slot would be as large as the base model's own matrix; leave out one of them"
            )
        if self.lora_saved_modules and "none" not in (self.quantize, self.quantize_head):
            raise ConfigError(
                f"{wanted} takes the place of floats, and --quantize-head is {self.quantize_head}; "
                "pass --quantize-head none"
            )

    def _check_codes(self) -> None:
        check_choice("--quantize", self.quantize, tuple(QUANTIZED_BITS))
        check_choice("--quantize-head", self.quantize_head, QUANTIZED_HEADS)
        check_choice("--quantize-block", str(self.quantize_block), tuple(map(str, QUANTIZE_BLOCKS)))
        check_choice("--quantize-level", self.quantize_level, QUANTIZE_LEVELS)
        if self.calibration is not None and self.quantize not in CALIBRATED:
            raise ConfigError(
                f"--calibration is a text for --quantize {' or '.join(CALIBRATED)}, and --quantize "
                f"is {self.quantize}; leave out one of them"
            )
        if self.quantize != "none" and self.dtype == "bfloat16":
            raise ConfigError(
                f"--quantize {self.quantize} takes --dtype float16 or float32; it is bfloat16"
            )


def check_no_aot_slots(lora_plugin: str, max_loras: int) -> None:
    """Refuse slots where the plugin lies in the plan.

    Raises:
        ConfigError: both are asked for.
    """
    if max_loras and lora_plugin == "aot":
        raise ConfigError(
            f"--lora-plugin aot takes one adapter at a time, and --max-loras is {max_loras}; pass "
            "--lora-plugin plugin, or leave out --max-loras"
        )
