"""Copies of base weights that PEFT saves beside an adapter: passed over where nothing trained them.

PEFT does so by itself for an adapter of the output head, tied or not, and for both embeddings where
it is asked to.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.adapters.peft_fields import (
    HEAD_COPY,
    PREFIX,
    Q_AND_HEAD,
    Q_AND_V,
    WEIGHTS,
    Running,
    assert_answers_as_peft,
    assert_refused,
    base_of,
    bound_manager,
    difference,
    loaded,
    prompt,
)
from support.models.tiny_models import save_adapter

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import load_adapter
from trt_lora.runtime import save_adapter as save_as
from trt_lora.runtime.adapters.fitting.fit import fit_adapter, preview_adapter
from trt_lora.runtime.files.untrusted_file import AdapterFile, Bytes, ReadBuffer
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow  # for the engines that all of them share

EMBEDDING_COPY = f"{PREFIX}model.embed_tokens.weight"
PLAIN_HEAD_COPY = f"{PREFIX}lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def head(running: dict[str, Running], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of q_proj and lm_head for the Llama, as PEFT saves it."""
    folder = tmp_path_factory.mktemp("head")
    return save_adapter(running["Llama"].model, folder / "a", target_modules=Q_AND_HEAD)


def changed(adapter: Path, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy an adapter; its tensors are what `change` returns of them."""
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    save_file(change(load_file(adapter / WEIGHTS)), directory / WEIGHTS, {"format": "pt"})
    return directory


def trained(tensors: Tensors) -> Tensors:
    """What training the head itself would do."""
    return tensors | {HEAD_COPY: tensors[HEAD_COPY] + 0.5}


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [("Llama", Q_AND_HEAD), ("Llama", r".*(q_proj|lm_head)"), ("GPT2", ["c_attn", "lm_head"])],
    ids=["untied", "pattern", "tied"],
)
def test_what_peft_saves_by_default_for_a_head_is_taken_and_its_copy_listed(
    architecture: str, modules: Any, running: dict[str, Running], tmp_path: Path
) -> None:
    at = running[architecture]
    adapter = save_adapter(at.model, tmp_path / "a", target_modules=modules)
    assert HEAD_COPY in load_file(adapter / WEIGHTS)
    coverage, ours = loaded(at, adapter)
    assert_answers_as_peft(at, adapter, ours)
    assert coverage.ignored == {HEAD_COPY: "it is a copy of the base model's own lm_head.weight"}
    assert coverage.unexpected_keys == {}
    assert [site.rank for site in coverage.sites if site.path == "lm_head"] == [8]


def test_copies_of_both_embeddings_are_taken(llama: Running, tmp_path: Path) -> None:
    with suppress_output():
        plain = save_adapter(llama.model, tmp_path / "plain", target_modules=Q_AND_V)
        PeftModel.from_pretrained(base_of(llama.model), plain).save_pretrained(
            str(tmp_path / "a"), save_embedding_layers=True
        )
    coverage, ours = loaded(llama, tmp_path / "a")
    assert_answers_as_peft(llama, tmp_path / "a", ours)
    assert coverage.ignored.keys() == {EMBEDDING_COPY, PLAIN_HEAD_COPY}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_of_a_model_that_was_loaded_in_another_dtype_is_taken(
    dtype: torch.dtype, llama: Running, tmp_path: Path
) -> None:
    with suppress_output():
        plain = save_adapter(llama.model, tmp_path / "plain", target_modules=Q_AND_HEAD)
        base = transformers.AutoModelForCausalLM.from_pretrained(llama.model, dtype=dtype)
        own = {n: t for n, t in load_file(plain / WEIGHTS).items() if "lora_" in n}
        save_file(own, plain / WEIGHTS, {"format": "pt"})
        PeftModel.from_pretrained(base, plain).save_pretrained(str(tmp_path / "a"))
    copy = load_file(tmp_path / "a" / WEIGHTS)[HEAD_COPY]
    assert copy.dtype == dtype
    assert not torch.equal(copy.float(), base_of(llama.model).lm_head.weight)  # it is rounded
    name = str(dtype).removeprefix("torch.")
    coverage, _ = loaded(llama, tmp_path / "a")
    assert coverage.ignored[HEAD_COPY].endswith(f"own lm_head.weight, rounded to {name}")
    widened = changed(
        tmp_path / "a", tmp_path / "b", lambda tensors: {n: t.float() for n, t in tensors.items()}
    )
    assert loaded(llama, widened)[0].ignored == coverage.ignored


def test_a_trained_copy_is_refused_by_name_with_the_command_that_merges_it(
    llama: Running, head: Path, tmp_path: Path
) -> None:
    adapter = changed(head, tmp_path / "a", trained)
    merge = f"trt-lora merge --model DIR --adapter {adapter} OUT"
    assert_refused(llama, adapter, HEAD_COPY, "other values than lm_head.weight", merge)
    coverage, ours = loaded(llama, adapter, strict=False)
    assert coverage.unexpected_keys.keys() == {HEAD_COPY}
    reference = PeftReference(llama.model, {"a": adapter}).logits("a", *prompt())
    assert difference(ours, reference) > 0.05  # PEFT loads it in the place of the model's own


def test_a_copy_with_added_tokens_is_refused_with_both_shapes(
    llama: Running, head: Path, tmp_path: Path
) -> None:
    def resized(tensors: Tensors) -> Tensors:
        return tensors | {HEAD_COPY: torch.cat([tensors[HEAD_COPY], torch.zeros(3, 32)])}

    adapter = changed(head, tmp_path / "a", resized)
    shapes = "has shape [100, 32], lm_head.weight of the base model [97, 32]"
    assert_refused(llama, adapter, HEAD_COPY, shapes)


def test_an_engine_of_an_earlier_release_refuses_every_copy_and_says_why(
    llama: Running, head: Path
) -> None:
    manifest = llama.engine.manifest
    older = replace(manifest, base_model=replace(manifest.base_model, embeddings={}))
    with pytest.raises(AdapterError) as raised:
        fit_adapter(load_adapter(head), older)
    message = str(raised.value)
    assert f"{HEAD_COPY} (it is a copy of a base weight; if that was not trained, save" in message
    assert "the engine's manifest, of an earlier release, has no hash to compare it" in message


def test_a_copy_is_read_in_blocks_and_once(
    llama: Running, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.zeros(3, 1 << 20)  # 12 MiB
    adapter = changed(head, tmp_path / "a", lambda tensors: tensors | {HEAD_COPY: large})
    manifest = llama.engine.manifest
    known = manifest.base_model.embeddings["lm_head.weight"]
    embeddings = {"lm_head.weight": replace(known, shape=(3, 1 << 20))}
    sizes, original = list[int](), AdapterFile.read

    def read(file: AdapterFile, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes:
        sizes.append(size)
        return original(file, start, size, buffer)

    monkeypatch.setattr(AdapterFile, "read", read)
    base = replace(manifest.base_model, embeddings=embeddings)
    opened = load_adapter(adapter)
    engine = replace(manifest, base_model=base)
    found = [preview_adapter(opened, engine, strict=False) for _ in range(2)]
    assert [coverage.unexpected_keys.keys() for coverage in found] == [{HEAD_COPY}] * 2
    assert max(sizes) == 4 << 20
    assert sum(size for size in sizes if size == 4 << 20) == 12 << 20


def test_a_copy_is_compared_though_its_file_changed_before_the_engine_came(
    llama: Running, head: Path, tmp_path: Path
) -> None:
    adapter = changed(head, tmp_path / "a", lambda tensors: tensors)
    manager = bound_manager(llama.engine)
    pending = type(manager)()
    pending.load_weights("a", adapter)
    (adapter / WEIGHTS).write_bytes(b"another")
    pending.initialize_engine_bindings(llama.engine)
    assert pending.get_adapter_names() == ["a"]


def test_an_adapter_with_a_copy_is_converted_for_an_engine_that_knows_the_weight(
    llama: Running, head: Path, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=r"copy of a base weight.* pass the engine"):
        save_as(load_adapter(head), tmp_path / "none", "peft")
    assert list(tmp_path.iterdir()) == []
    save_as(load_adapter(head), tmp_path / "b", "peft", manifest=llama.engine.manifest)
    assert {name for name in load_file(tmp_path / "b" / WEIGHTS) if "lora_" not in name} == set()
    assert difference(loaded(llama, tmp_path / "b")[1], loaded(llama, head)[1]) == 0
