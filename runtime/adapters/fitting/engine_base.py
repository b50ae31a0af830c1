"""What of an adapter needs the base model's values, from an engine's own file of weights."""

from collections.abc import Iterator
from pathlib import Path

from trt_lora.plugins.contract.modules import is_embedding
from trt_lora.plugins.contract.sites import MAGNITUDE, TRAINED_BIAS
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.dora import Base, with_scales
from trt_lora.runtime.adapters.fitting.trained_biases import with_bias_differences
from trt_lora.runtime.adapters.fitting.trained_tokens import with_token_pairs
from trt_lora.runtime.adapters.formats.peft_config import merge_advice
from trt_lora.runtime.files.stored_matrix import Block, bias_of
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE, Manifest

_CONVERT = "convert the adapter first: trt-lora convert-adapter IN OUT --format edgellm --base DIR"


def fit_to_base(adapter: Adapter, manifest: Manifest, directory: Path | None) -> Adapter:
    """Return the adapter as it is for the engine's weights.

    Scales and biases take the place of magnitudes and of trained biases, A and B that of tokens.

    Args:
        adapter: any; with vectors the engine takes them.
        manifest: of the engine.
        directory: of the engine; None where neither will be read.

    Raises:
        AdapterError: a magnitude has no A and B beside it, or a site's weight is none of floats; a
            trained bias is of a site without one; trained tokens have no site. When values are
            read: the engine's cannot be, a magnitude is not above 0, or a size is another.
    """
    sites = {site.path for site in manifest.sites}
    for kind, path in adapter.vectors:
        if kind == MAGNITUDE and is_embedding(path):
            raise AdapterError(
                f"{adapter.source}: DoRA of {path} is none that an engine takes, for it is an "
                f"embedding; {merge_advice(adapter.source)}"
            )
        if kind == MAGNITUDE and path in sites - manifest.matrices.keys():
            why = f"DoRA needs the weight of {path}, and the engine has none of floats"
            raise AdapterError(f"{adapter.source}: {why}; {_CONVERT}")
        if kind == TRAINED_BIAS and path in sites and bias_of(path) not in manifest.matrices:
            raise AdapterError(
                f"{adapter.source} has a bias for {path}, which has none in "
                f"{manifest.base_model.name}: it was trained on another base model"
            )
    base = _base_of_engine(adapter.source, manifest, directory)
    adapter = with_bias_differences(with_scales(adapter, base, sites), base, sites)
    return with_token_pairs(adapter, manifest, base)


def _base_of_engine(source: str, manifest: Manifest, directory: Path | None) -> Base:
    def blocks(path: str) -> Iterator[Block]:
        if directory is None:
            why = f"{path} is changed by what needs the base model's weights"
            raise AdapterError(f"{source}: {why}; {_CONVERT}")
        try:
            yield from manifest.matrices[path].blocks(directory / ONNX_WEIGHTS_FILE)
        except (OSError, ValueError) as error:
            why = f"the weights that DoRA or a bias needs cannot be read: {error}"
            raise AdapterError(f"{source}: {why}; {_CONVERT}") from error

    return blocks
