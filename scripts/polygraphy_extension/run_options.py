"""LoRA options and runners of `polygraphy run`: `--trt-lora` and `--lora-float64`.

polygraphy calls `argument_groups` (entry point `polygraphy.run.plugins`) whatever it is going to
do, so that nothing heavy is imported before a LoRA option is there; without one nothing changes.
"""

from pathlib import Path
from typing import Any

from polygraphy.tools.args import OnnxLoadArgs
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import make_invocable

from trt_lora.scripts.polygraphy_extension.option_names import (
    FALLBACK,
    FLOAT64,
    FLOAT64_NAME,
    NO_ADAPTER,
    TENSORRT_LORA,
)


def argument_groups() -> list[Any]:
    """Return what is added to `polygraphy run`; `LoraArgs` last, to see all others parsed."""
    return [LoraTensorRTArgs(), LoraReferenceArgs(), LoraArgs()]


class LoraTensorRTArgs(BaseRunnerArgs):  # type: ignore[misc] # polygraphy has no types
    """TensorRT with LoRA Inference: running an engine's plan with the LoRA plugin."""

    arg_groups: Any

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Return the runner's name and option."""
        return "TensorRT with the LoRA plugin", TENSORRT_LORA

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner."""
        script.add_import(
            imports=["LoraTensorRTRunner"],
            frm="trt_lora.scripts.polygraphy_extension.tensorrt_runner",
        )
        engine = str(self.arg_groups[LoraArgs].engine)
        script.add_runner(make_invocable("LoraTensorRTRunner", engine))


class LoraReferenceArgs(BaseRunnerArgs):  # type: ignore[misc] # polygraphy has no types
    """LoRA Reference Inference: running an ONNX model in numpy, LoRA nodes in float64.

    Depends on:

        - OnnxLoadArgs
    """

    arg_groups: Any

    def get_name_opt_impl(self) -> tuple[str, str]:
        """Return the runner's name and option."""
        return FLOAT64_NAME, FLOAT64

    def add_to_script_impl(self, script: Any) -> None:
        """Add the runner; it marks outputs as `--onnxrt` does."""
        script.add_import(
            imports=["LoraReferenceRunner"],
            frm="trt_lora.scripts.polygraphy_extension.float64_runner",
        )
        loader = self.arg_groups[OnnxLoadArgs].add_to_script(script)
        script.add_runner(make_invocable("LoraReferenceRunner", loader))


class LoraArgs(BaseArgs):  # type: ignore[misc] # polygraphy has no types
    """LoRA: adapters, and inputs that an engine of trt-lora takes.

    Depends on:

        - ModelArgs
        - RunnerSelectArgs
        - DataLoaderArgs
        - OnnxLoadArgs
        - TrtConfigArgs
        - TrtLoadNetworkArgs
        - CompareFuncSimpleArgs
    """

    group: Any
    arg_groups: Any

    def add_parser_args_impl(self) -> None:
        """Add the options."""
        add = self.group.add_argument
        add(
            "--lora-adapter",
            action="append",
            metavar="NAME=PATH",
            help="An adapter, in any format that trt-lora reads; may be given many times",
        )
        add(
            "--lora-use",
            metavar="NAME",
            help=f"The adapter in use, or {NO_ADAPTER!r}, the base model. "
            "Defaults to the only adapter, or the base model if there is none",
        )
        add(
            "--lora-prompt",
            metavar="TEXT",
            help="A user's message, instead of random tokens; the engine needs a tokenizer",
        )
        add(
            "--lora-engine",
            metavar="DIR",
            help="The engine directory, for a model that lies elsewhere. "
            "Defaults to the model's own",
        )
        add(
            f"--{FALLBACK}",
            action="store_true",
            default=None,
            help=f"Without a GPU, run --{FLOAT64} in the place of --{TENSORRT_LORA} and --trt, "
            "instead of failing",
        )

    def parse_impl(self, args: Any) -> None:
        """Parse the options, and fit polygraphy's own groups to the engine.

        Attributes:
            engine (Path): the engine directory; None if there is no LoRA option.
        """
        self.engine: Path | None = None
        given = (args.lora_adapter, args.lora_use, args.lora_prompt, args.lora_engine)
        is_asked = any(option is not None for option in (*given, args.trt_lora_fallback))
        if not is_asked and not {TENSORRT_LORA, FLOAT64} & set(args.runners):
            return
        from trt_lora.scripts.polygraphy_extension.prepare import LoraOptions, prepare

        self.engine = prepare(
            self.arg_groups,
            LoraOptions(
                adapters=tuple(args.lora_adapter or ()),
                use=args.lora_use,
                prompt=args.lora_prompt,
                engine=args.lora_engine,
                fallback=bool(args.trt_lora_fallback),
            ),
        )
