"""Argument group that replaces polygraphy's data loader with that of an engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import DataLoaderArgs, ModelArgs
from polygraphy.tools.script import make_invocable

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS


class LoraDataArgs(DataLoaderArgs):  # type: ignore[misc] # polygraphy has no types
    """LoRA Data Loader: inputs that an engine of trt-lora takes."""

    def __init__(self, loader: Any) -> None:
        """Keep the call that makes the data loader."""
        super().__init__()
        self.loader = loader
        self.load_inputs_paths: list[str] = []

    def _add_to_script_helper(
        self, script: Any, user_input_metadata_str: Any = None
    ) -> tuple[Any, bool]:
        """Add it: what polygraphy's methods that add a loader, and that make one, come down to."""
        script.add_import(
            imports=["LoraInputs"], frm="trt_lora.scripts.polygraphy_extension.data_loader"
        )
        return script.set_data_loader(self.loader), False

    def is_using_random_data(self) -> bool:
        """Return False: calibration may use them."""
        return False


def use_inputs(groups: Any, engine: Path, adapter: Path | None, prompt: str | None) -> None:
    """Feed every runner the inputs of `engine`, unless the command loads inputs from elsewhere.

    `--seed`, `--iterations` and `--input-shapes` are polygraphy's own.

    Raises:
        ConfigError: shapes are given for another input than the tokens, or with a prompt; or an
            adapter or a prompt, and the inputs come from elsewhere.
    """
    theirs = groups[DataLoaderArgs]
    if theirs.load_inputs_paths or theirs.data_loader_script:
        if adapter is not None or prompt is not None:
            raise ConfigError(
                "the inputs are loaded, with the adapter and the tokens that are in them; leave "
                "out --lora-prompt and --lora-adapter, or give --lora-use none"
            )
        return
    if theirs.val_range:
        G_LOGGER.warning("--val-range has no effect on the inputs of an engine of trt-lora")
    shape = _shape(groups[ModelArgs].input_shapes)
    if shape and prompt is not None:
        raise ConfigError("--lora-prompt has a shape of its own; leave out --input-shapes")
    call = make_invocable(
        "LoraInputs",
        str(engine),
        adapter=str(adapter) if adapter else None,
        prompt=prompt,
        shape=shape,
        seed=theirs.seed,
        iterations=theirs.iterations,
    )
    groups[DataLoaderArgs] = LoraDataArgs(call)


def _shape(shapes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Batch and length of a prompt; every other shape follows from them."""
    given = {name: list(tensor.shape) for name, tensor in shapes.items()}
    if not given:
        return None
    sizes = given.get(INPUT_IDS, [])
    if len(given) > 1 or len(sizes) != 2 or not all(isinstance(s, int) and s > 0 for s in sizes):
        raise ConfigError(
            f"--input-shapes is {given}; give {INPUT_IDS}:[batch,tokens] alone, the rest follows"
        )
    return sizes[0], sizes[1]
