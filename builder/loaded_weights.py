"""What transformers made of a checkpoint: every weight of the model, from the file, and finite."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.match import listed


def check_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Refuse a model that has weights of its own making, or a checkpoint that was not used up.

    Args:
        directory: of the model.
        report: what `from_pretrained(..., output_loading_info=True)` tells.

    Raises:
        ModelError: names are missing, unexpected or of another shape.
    """
    faults = [f"{len(names)} {what} ({listed(names)})" for what, names in _faults(report) if names]
    if faults:
        raise ModelError(
            f"the weights in {directory} are not those that its config.json describes: "
            f"{', '.join(faults)}. Pass a model that save_pretrained wrote, or mend config.json: "
            "layers, vocabulary, tie_word_embeddings"
        )


def _faults(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    shapes = [
        f"{name} is {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    yield "are missing", sorted(report["missing_keys"])
    yield "are unknown to the model", sorted(report["unexpected_keys"])
    yield "have another shape", shapes
    yield "could not be read", [" ".join(text.split()) for text in report["error_msgs"]]


def check_names(directory: Path, stored: set[str], model: Any) -> None:
    """Refuse two weights of a checkpoint for one of the model: transformers takes either.

    It reads names with and without the base model's prefix, such as `model.`.

    Args:
        directory: of the model.
        stored: the checkpoint's names.
        model: what it was loaded into.

    Raises:
        ModelError: there are two.
    """
    prefix = f"{model.base_model_prefix}."
    own = model.state_dict().keys()
    twice = [
        f"{name} and {twin}"
        for name in sorted(stored - own)
        for twin in (prefix + name, name.removeprefix(prefix))
        if twin != name and twin in stored
    ]
    if twice:
        raise ModelError(f"{directory} has weights twice, under two names: {listed(twice)}")


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
        if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
            raise ModelError(f"{directory}: {name} {_what_is_wrong(tensor.detach())}")


def _is_finite(tensor: torch.Tensor) -> bool:
    low, high = torch.aminmax(tensor.detach())  # NaN wins in both; no copy, unlike isfinite
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _what_is_wrong(tensor: torch.Tensor) -> str:
    if tensor.isnan().any():
        return "has NaN values: the model is damaged; download or copy it again"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return (
        f"has infinite values in {dtype}, whose largest is {torch.finfo(tensor.dtype).max:g}: the "
        "model is damaged, or needs --dtype bfloat16 or float32"
    )
