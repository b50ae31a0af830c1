"""A tiny random engine that speaks bytes, so that it can read and write any text, JSON for one."""

import json
import string
from pathlib import Path

from support.models.quick_build import quick_build
from support.models.tiny_models import save_model, tiny_config
from support.served_engines import write_adapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.runtime.manifest import Manifest

SPECIAL = ["<pad>", "<s>", "</s>"]  # the ids that the tiny models' configs give them
LENGTH = 4096
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_letters(folder: Path, slots: int = 2, adapters: int = 2) -> dict[str, Path]:
    """Build `folder`/engine for four rows; return adapters by name, "a" first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    sizes = {"vocab_size": len(vocabulary), "max_position_embeddings": LENGTH}
    model = save_model("Llama", folder / "model", **sizes)
    _write_words(model, vocabulary)
    limits = {
        "max_loras": slots,
        "max_batch_size": 4,
        "max_input_len": LENGTH,
        "max_seq_len": LENGTH,
    }
    targets = ("attn_q", "attn_v")
    built = quick_build(tiny_config(model, folder / "engine", target_modules=targets, **limits))
    return _adapters(folder / "adapters", built, adapters)


def _write_words(model: Path, vocabulary: dict[str, int]) -> None:
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.add_special_tokens(SPECIAL)
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.save(str(model / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _adapters(folder: Path, manifest: Manifest, count: int) -> dict[str, Path]:
    names = string.ascii_lowercase[:count]
    return {
        name: write_adapter(folder / name, manifest, rank=4 + 4 * (seed % 2), seed=seed)
        for seed, name in enumerate(names, 4)
    }
