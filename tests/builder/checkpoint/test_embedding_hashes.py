"""Hashes of embeddings: a copy has one of them in whatever dtype its model was loaded."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import EMBEDDINGS, HEAD, with_shards, with_weights
from support.models.tiny_models import save_model
from transformers import AutoModelForCausalLM

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.embedding_hashes import embedding_hashes
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.runtime.files.base_weights import values_sha256

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@suppress_output()
def loaded(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)


def digest(values: torch.Tensor) -> str:
    """The whole array at once, as float32."""
    return hashlib.sha256(values.detach().float().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_a_weight_loaded_in_any_dtype_has_one_of_the_hashes(
    stored: torch.dtype, model: Path, tmp_path: Path
) -> None:
    directory = with_weights(
        model, tmp_path / "m", lambda weights: {n: w.to(stored) for n, w in weights.items()}
    )
    for engine in DTYPES:  # what the engine is built in does not matter
        hashes = embedding_hashes(Checkpoint(directory), loaded(directory, engine))
        assert hashes.keys() == {HEAD, EMBEDDINGS}
        for dtype in DTYPES:
            head = loaded(directory, dtype).lm_head.weight
            assert digest(head) in hashes[HEAD].sha256.values()
            assert digest(head + 0.01) not in hashes[HEAD].sha256.values()
        assert hashes[HEAD].shape == (97, 32)


def test_what_no_dtype_rounds_has_one_hash(model: Path, tmp_path: Path) -> None:
    directory = with_weights(
        model, tmp_path / "m", lambda weights: {n: w.round() for n, w in weights.items()}
    )
    found = embedding_hashes(Checkpoint(directory), loaded(directory))
    assert [weight.sha256.keys() for weight in found.values()] == [{"float32"}, {"float32"}]


def test_both_names_of_a_tied_weight_have_its_hashes(tied: Path) -> None:
    found = embedding_hashes(Checkpoint(tied), loaded(tied))
    assert found.keys() == {HEAD, EMBEDDINGS}
    assert found[HEAD] == found[EMBEDDINGS]


def test_names_without_the_models_prefix_are_found_in_any_shard(tmp_path: Path) -> None:
    model = save_model("GPT2", tmp_path / "m")
    base = loaded(model)
    weights = base.transformer.state_dict()  # as the hub has GPT-2
    directory = with_shards(model, tmp_path / "s", {"a": {}, "b.safetensors": weights})
    found = embedding_hashes(Checkpoint(directory), base)
    assert found.keys() == {"lm_head.weight", "transformer.wte.weight"}
    assert found["lm_head.weight"].sha256["float32"] == digest(base.lm_head.weight)


def test_the_hash_does_not_depend_on_the_blocks() -> None:
    values = np.random.default_rng(0).standard_normal(1000, np.float32)

    def blocks(size: int) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        for start in range(0, len(values), size):
            yield values[start : start + size]

    expected = hashlib.sha256(values.tobytes()).hexdigest()
    assert [values_sha256(blocks(size)) for size in (1, 7, 1000)] == [expected] * 3
