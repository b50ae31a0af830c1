"""Engines and answers that the tests of PEFT's fields and files compare."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig
from support.models import tiny_models as tiny
from support.models.tiny_models import save_adapter

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Engine, LoRAManager, TensorMap
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.engines.topk import Logits
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

Make = Callable[[Path, Path], Path]  # model, directory -> the adapter that PEFT saved there

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"
Q_AND_V, Q_AND_HEAD = ["q_proj", "v_proj"], ["q_proj", "lm_head"]
SAVE_AGAIN = "save the adapter again with save_embedding_layers=False"


def peft(**options: Any) -> Make:
    """Make what `get_peft_model` and `save_pretrained` make of these options."""
    return partial(save_adapter, **options)


def lora(**options: Any) -> Any:
    """Return PEFT's config; its type hints lack values that PEFT takes."""
    return LoraConfig(task_type="CAUSAL_LM", **options)


def base_of(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@dataclass(frozen=True)
class Refused:
    """An adapter that is refused by the field's name and its value as saved, and with advice."""

    make: Make
    advice: str  # {adapter} stands for its path
    model: str = "Llama"
    tensor: str = ""  # what the message names instead where the field alone does no harm


@dataclass(frozen=True)
class Running:
    """A running engine with sites on every linear and lm_head, and its tiny random model."""

    model: Path
    engine: Engine
    base: Logits


def bound_manager(engine: Engine) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    return manager


def prompt() -> tuple[Any, Any]:
    """Ids and mask [2, 12]; the first row is left-padded by three."""
    ids = np.random.default_rng(0).integers(3, tiny.VOCABULARY, (2, 12))
    mask = np.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    return ids, mask


def logits(engine: Engine, manager: LoRAManager) -> Logits:
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    ids, mask = prompt()
    real = mask.astype(bool)
    rows = [row[shown].tolist() for row, shown in zip(ids, real, strict=True)]
    found = np.zeros((*ids.shape, tiny.VOCABULARY), np.float32)
    found[real] = np.concatenate(forced_logits(engine, tensor_map, rows, decoded=0))
    return found


def loaded(at: Running, adapter: Path, *, strict: bool = True) -> tuple[Coverage, Logits]:
    """The coverage of an adapter in an engine, and the logits with it."""
    manager = bound_manager(at.engine)
    coverage = manager.load_weights("a", adapter, strict=strict)
    assert coverage is not None
    manager.switch_weights("a")
    return coverage, logits(at.engine, manager)


def difference(ours: Logits, theirs: Logits) -> float:
    """The largest difference at positions that are not padding."""
    real = prompt()[1].astype(bool)
    return float(np.abs(ours[real] - theirs[real]).max())


def assert_answers_as_peft(at: Running, adapter: Path, ours: Logits) -> PeftReference:
    """The same logits as PEFT's, and others than the base model's."""
    reference = PeftReference(at.model, {"a": adapter})
    assert difference(ours, reference.logits("a", *prompt())) < 1e-4
    assert difference(ours, at.base) > 0.05
    return reference


def assert_refused(at: Running, adapter: Path, *messages: str) -> None:
    """Refused with every one of the messages, and nothing is registered."""
    manager = bound_manager(at.engine)
    with pytest.raises(AdapterError) as caught:
        manager.load_weights("a", adapter)
    text = str(caught.value)
    assert [message for message in (str(adapter), *messages) if message not in text] == []
    assert manager.get_adapter_names() == []
