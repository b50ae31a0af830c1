"""Merge a PEFT adapter into the checkpoint of its base model, for what no engine can apply."""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from transformers import GenerationConfig

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.weight_files import stored_dtype
from trt_lora.builder.progress import Progress
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.generation.parameters.default_sampling import GENERATION_FILE

_GenerationConfig: Any = GenerationConfig  # it has no types
_CODES = ("hf_quant_config.json", "quantize_config.json")  # of weights that are floats now
_TEXT = ("*.json", "*.jinja", "*.model", "*.txt")  # beside the weights of a model


def merge_adapter(
    model: Path, adapter: Path, work: Path, dtype: str | None, progress: Progress
) -> str:
    """Write a transformers directory: the model with the adapter in its weights, and its tokenizer.

    Args:
        model: directory of the base model.
        adapter: PEFT directory.
        work: exists and is empty.
        dtype: that the weights are loaded, merged and saved in; None: the checkpoint's.
        progress: told of every stage.

    Returns:
        That dtype.

    Raises:
        ModelError: the base model cannot be loaded.
        AdapterError: PEFT cannot load the adapter on this model, or cannot merge it.
    """
    progress.stage("load")
    checkpoint = Checkpoint(model)
    dtype = dtype or stored_dtype(checkpoint.weights)
    base = load_model(checkpoint, dtype)
    progress.stage("merge")
    with _refused(model, adapter), suppress_output():
        merged = _merged(base, adapter)
    progress.stage("save")
    # The model's own file is copied: transformers does not save what it finds contradictory.
    merged.generation_config = _GenerationConfig()
    with suppress_output():
        merged.save_pretrained(work)
    (work / GENERATION_FILE).unlink()
    _copy_text(model, work)
    return dtype


@contextmanager
def _refused(model: Path, adapter: Path) -> Iterator[None]:
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:  # PEFT raises errors of many kinds, most of them as built-in classes
        reason = " ".join(f"{error}".split())[:500] or type(error).__name__
        raise AdapterError(f"PEFT cannot merge {adapter} into {model}: {reason}") from error


def _merged(base: Any, adapter: Path) -> Any:
    config: Any = PeftConfig.from_pretrained(str(adapter))
    wrapped: Any = PeftModel(base, config)
    found = wrapped.load_adapter(str(adapter), "default")
    if missing := found.missing_keys:
        raise AdapterError(
            f"{adapter} lacks {len(missing)} tensors that its config asks for, such as "
            f"{shown(missing[0])}; copy or save the adapter again"
        )
    # PEFT adds to a weight in place: to the input embedding too, where the head is tied to it.
    adapted = [layer for layer in wrapped.modules() if isinstance(layer, LoraLayer)]
    _separate(wrapped, [layer.get_base_layer() for layer in adapted])
    merged = wrapped.merge_and_unload(safe_merge=True)
    ends = (merged.get_input_embeddings(), merged.get_output_embeddings())
    _separate(merged, [module for module in merged.modules() if module not in ends])  # of copies
    return merged


def _separate(model: Any, modules: Iterable[Any]) -> None:
    """Give each of these modules weights of its own, where others of the model share them."""
    every = (weight for module in model.modules() for weight in module.parameters(recurse=False))
    places = Counter(map(id, every))
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)):
            if places[id(weight)] > 1:
                places[id(weight)] -= 1
                setattr(module, name, torch.nn.Parameter(weight.detach().clone()))


def _copy_text(model: Path, work: Path) -> None:
    """Copy tokenizer, chat template, sampling defaults and the like, but nothing that is there."""
    for path in (path for pattern in _TEXT for path in model.glob(pattern)):
        is_own = path.name.endswith(".index.json") or path.name in _CODES
        if not (is_own or (work / path.name).exists()):
            shutil.copyfile(path, work / path.name)
