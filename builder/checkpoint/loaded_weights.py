"""Check the weights that transformers loaded: complete, from the checkpoint, finite."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import __version__

from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import listed

# Constants that older releases saved; transformers ignores them for some of the models.
_OLD_MASK = re.compile(r"\.(attn|attention)\.(masked_)?bias$")


def check_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Refuse a model that has weights of its own making, or a checkpoint that was not used up.

    Args:
        directory: of the model.
        report: what `from_pretrained(..., output_loading_info=True)` tells.

    Raises:
        ModelError: names are missing, unexpected or of another shape.
    """
    faults = [
        f"{len(names)} {label} ({listed(names)})" for label, names in _faults(report) if names
    ]
    if faults:
        raise ModelError(
            f"the weights in {directory} are not those that its config.json describes: "
            f"{', '.join(faults)}. Pass a model that save_pretrained wrote, or mend config.json: "
            "layers, vocabulary, tie_word_embeddings"
        )


def _faults(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    shapes = [
        f"{name} is {list(shape)}, expected {list(expected)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    yield "are missing", sorted(report["missing_keys"])
    unknown = sorted(report["unexpected_keys"])
    yield "are unknown to the model", [name for name in unknown if not _OLD_MASK.search(name)]
    yield "have another shape", shapes
    yield "could not be read", [" ".join(text.split()) for text in report["error_msgs"]]


def check_ties(directory: Path, model: Any) -> None:
    """Refuse two different weights where the config says that they are one.

    Raises:
        ModelError: there are; transformers would keep both, other programs one of them.
    """
    expected = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = [
        f"{name} and {expected[name]}" for name in expected.keys() - model.all_tied_weights_keys
    ]
    if apart:
        raise ModelError(
            f"{directory / 'config.json'} ties {listed(sorted(apart))}, but the weights hold "
            "different values for them; set tie_word_embeddings to false if both are right"
        )


def check_finite(directory: Path, model: Any) -> None:
    """Refuse weights and buffers with NaN or infinite values, one tensor at a time.

    Raises:
        ModelError: there are; in a 16-bit type a value of the file may have overflowed.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.numel():
            check_tensor(directory, name, tensor.detach())


def check_tensor(directory: Path, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or infinite values.

    Raises:
        ModelError: it has such.
    """
    if not _is_finite(tensor):
        raise ModelError(f"{directory}: {name} {_what_is_wrong(tensor)}")


def check_values(tensors: Iterable[tuple[Path, str, torch.Tensor]], model: Any) -> None:
    """Refuse weights that are not those of the file: transformers initialises some models anew.

    Names are taken with and without the base model's prefix, such as `model.`; weights that
    transformers renames or fuses are not compared.

    Args:
        tensors: of the checkpoint, each with its file and its name.
        model: what they were loaded into.

    Raises:
        ModelError: a weight has other values; two of the files' weights may be for one of these.
    """
    loaded: dict[str, torch.Tensor] = model.state_dict()
    for path, name, stored in tensors:
        own = next((known for known in own_names(name, model) if known in loaded), None)
        if own and not torch.equal(loaded[own], stored.to(loaded[own].dtype)):
            raise ModelError(
                f"{path}: transformers {__version__} does not give {own} the values that "
                f"{name} has in the file"
            )


def own_names(name: str, model: Any) -> tuple[str, ...]:
    """Return the names that a checkpoint's weight or module may have in the model."""
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _is_finite(tensor: torch.Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # NaN wins in both; no copy, unlike isfinite
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _what_is_wrong(tensor: torch.Tensor) -> str:
    if tensor.isnan().any():
        return "has NaN values: the model is damaged; download or copy it again"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (
        f"has infinite values in {dtype}, whose largest is {torch.finfo(tensor.dtype).max:g}: the "
        "model is damaged, or needs --dtype bfloat16 or float32"
    )
