"""References of `trt-lora compare`, as the commands that compute their outputs."""

from dataclasses import dataclass

from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import ONNX_FILE, Manifest
from trt_lora.scripts.comparison.shell_commands import POLYGRAPHY, Command, python_command

ENGINE, OTHER = "$ENGINE", "$OTHER"  # places in commands
ONNX_VARIANTS = "comparison.onnx_variants"  # a module
ONNXRT, TRT, TRT_LORA = "--onnxrt", "--trt", "--trt-lora"


@dataclass(frozen=True)
class ComparisonCase:
    """One adapter, or the base model, in one comparison; paths are relative to its folder."""

    name: str
    adapter: str = ""  # its place, e.g. $ADAPTER_1; empty for the base model

    @property
    def inputs(self) -> str:
        """The folder of the engine's inputs."""
        return f"inputs/{self.name}"

    def outputs(self, runner: str, *, sites: bool = False) -> str:
        """Return the file of a runner's outputs, or of what its sites read and return."""
        return f"{'sites' if sites else 'outputs'}/{self.name}/{runner}.json"

    @property
    def accuracy(self) -> str:
        """The file of polygraphy's comparison."""
        return f"accuracy/{self.name}.json"

    def model(self, kind: str, *, sites: bool, folder: str = "models") -> str:
        """Return the file of a variant of an engine's ONNX graph."""
        name = f"{kind}-{self.name}" if kind == "merged" else kind  # the others serve every case
        return f"{folder}/{name}{'-sites' if sites else ''}.onnx"


def run_model(
    model: str, runner: str, inputs: str, *more: str, outputs: str, **environment: str
) -> Command:
    """Return the command that runs a model on inputs and writes its outputs, the last word."""
    words = (POLYGRAPHY, "run", model, runner, "--load-inputs", inputs, *more)
    return Command((*words, "--save-outputs", outputs), tuple(environment.items()))


def write_variant(case: ComparisonCase, kind: str, *, sites: bool, place: str = ENGINE) -> Command:
    """Return the command that writes a variant of an engine's ONNX graph, the last word."""
    more = ["--inputs", case.inputs] if kind == "merged" else []
    more += ["--sites"] if sites else []
    # Each engine has a folder of its own: its weights are not the other's.
    output = case.model(kind, sites=sites, folder="models" if place == ENGINE else "models.other")
    return python_command(ONNX_VARIANTS, kind, place, *more, "--output", output)


@dataclass(frozen=True)
class Reference:
    """What an engine is compared with: a variant of its graph, its native plan, another engine."""

    name: str  # how tables and files call it
    graph: str  # what its runner runs
    kind: str = "engine"  # of the variant that ONNX Runtime runs
    note: str = ""  # what the reader must know of it here
    flavour: str = ""  # of the plan that TensorRT runs instead, LoRA as matrix products, on a GPU
    other: Manifest | None = None  # of the other engine
    has_inputs: bool = False  # whether the other engine takes other names or dtypes

    @property
    def engine_runner(self) -> str:
        """The option of `polygraphy run` that runs the engine beside it."""
        return TRT_LORA if self.flavour else ONNXRT

    def inputs(self, case: ComparisonCase) -> str:
        """Return the folder of its inputs."""
        return f"{case.inputs}.{self.name}" if self.has_inputs else case.inputs

    def commands(self, case: ComparisonCase, *, sites: bool = False) -> list[Command]:
        """Return what writes `case.outputs(self.name)`; each command writes its last word."""
        outputs = case.outputs(self.name, sites=sites)
        if self.flavour:
            assert not sites  # a plan has no tensors but its outputs
            return [self._run_plan(case, outputs)]
        place = OTHER if self.other else ENGINE
        variant = write_variant(case, self.kind, sites=sites, place=place)
        return [variant, run_model(variant.words[-1], ONNXRT, self.inputs(case), outputs=outputs)]

    def _run_plan(self, case: ComparisonCase, outputs: str) -> Command:
        """Build the native plan and run it; polygraphy builds one per command."""
        is_rtx = self.flavour == TENSORRT_RTX.name
        rtx = {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} if is_rtx else {}
        # --lora-use makes the extension set the engine's profiles; the inputs are those of the file
        more = (case.inputs, "--lora-use", "none")
        return run_model(f"{ENGINE}/{ONNX_FILE}", TRT, *more, outputs=outputs, **rtx)
