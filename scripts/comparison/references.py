"""References of `trt-lora compare`, as the commands that compute their outputs."""

from dataclasses import dataclass
from typing import Protocol

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

    def model(self, kind: str, *, sites: bool) -> str:
        """Return the file of a variant of the engine's ONNX graph."""
        name = f"{kind}-{self.name}" if kind == "merged" else kind  # the others serve every case
        return f"models/{name}{'-sites' if sites else ''}.onnx"


class Reference(Protocol):
    """One thing to compare with."""

    @property
    def name(self) -> str:
        """How tables and files call it."""
        ...

    @property
    def engine_runner(self) -> str:
        """The option of `polygraphy run` that runs the engine beside it."""
        ...

    @property
    def graph(self) -> str:
        """What its runner ran, where that is not the engine itself; may be empty."""
        ...

    @property
    def note(self) -> str:
        """What the reader must know of it here; may be empty."""
        ...

    def commands(self, case: ComparisonCase, *, sites: bool = False) -> list[Command]:
        """Return what writes `case.outputs(self.name)`; each command writes its last word."""
        ...


def run_model(
    model: str, runner: str, inputs: str, *more: str, outputs: str, **environment: str
) -> Command:
    """Return the command that runs a model on inputs and writes its outputs, the last word."""
    words = (POLYGRAPHY, "run", model, runner, "--load-inputs", inputs, *more)
    return Command((*words, "--save-outputs", outputs), tuple(environment.items()))


def write_variant(case: ComparisonCase, kind: str, *, sites: bool) -> Command:
    """Return the command that writes a variant of the engine's ONNX graph."""
    more = ["--inputs", case.inputs] if kind == "merged" else []
    more += ["--sites"] if sites else []
    output = case.model(kind, sites=sites)
    return python_command(ONNX_VARIANTS, kind, ENGINE, *more, "--output", output)


@dataclass(frozen=True)
class Variant:
    """A variant of the engine's ONNX graph on ONNX Runtime."""

    name: str
    kind: str
    graph: str
    note: str = ""
    engine_runner: str = ONNXRT

    def commands(self, case: ComparisonCase, *, sites: bool = False) -> list[Command]:
        """Return what writes the variant and runs it."""
        model, outputs = case.model(self.kind, sites=sites), case.outputs(self.name, sites=sites)
        return [
            write_variant(case, self.kind, sites=sites),
            run_model(model, ONNXRT, case.inputs, outputs=outputs),
        ]


@dataclass(frozen=True)
class NativePlan:
    """The engine's LoRA nodes as TensorRT's own matrix products, beside the plugin, on a GPU."""

    flavour: str
    name: str = "native"
    graph: str = "LoRA as matrix products"
    note: str = ""
    engine_runner: str = TRT_LORA

    def commands(self, case: ComparisonCase, *, sites: bool = False) -> list[Command]:
        """Return what builds the native plan and runs it; polygraphy builds one per command."""
        assert not sites  # a plan has no tensors but its outputs
        is_rtx = self.flavour == TENSORRT_RTX.name
        rtx = {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} if is_rtx else {}
        model, outputs = f"{ENGINE}/{ONNX_FILE}", case.outputs(self.name)
        # --lora-use makes the extension set the engine's profiles; the inputs are those of the file
        return [run_model(model, TRT, case.inputs, "--lora-use", "none", outputs=outputs, **rtx)]


@dataclass(frozen=True)
class OtherEngine:
    """Another engine directory, on inputs of its own where it takes other names or dtypes."""

    manifest: Manifest
    graph: str
    has_inputs: bool
    name: str = "other"
    note: str = ""
    engine_runner: str = ONNXRT

    def inputs(self, case: ComparisonCase) -> str:
        """Return the folder of its inputs."""
        return f"{case.inputs}.{self.name}" if self.has_inputs else case.inputs

    def commands(self, case: ComparisonCase, *, sites: bool = False) -> list[Command]:
        """Return what runs it."""
        outputs = case.outputs(self.name, sites=sites)
        folder = f"models.{self.name}"  # its weights are not the engine's
        model, more = (f"{folder}/sites.onnx", ["--sites"]) if sites else (f"{folder}/all.onnx", [])
        return [
            python_command(ONNX_VARIANTS, "engine", OTHER, *more, "--output", model),
            run_model(model, ONNXRT, self.inputs(case), outputs=outputs),
        ]
