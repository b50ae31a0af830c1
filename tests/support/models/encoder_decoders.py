"""Tiny random encoder-decoders, adapters for them, and what transformers and PEFT say of them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.word_tokenizer import word_engine
from transformers import WhisperFeatureExtractor

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.runtime.memory.dtypes import Array

VOCABULARY = 128
# Of T5: all kinds of linears, those of the encoder alone, and keys of cross attention alone.
TARGETS: dict[str, str | list[str]] = {
    "all": ["q", "k", "v", "o", "wi", "wo"],
    "encoder": r"encoder\..*\.(q|v|wo)",
    "cross_k": r".*EncDecAttention\.k",
}
_SIZES = {
    "d_model": 32,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 2,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}
_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_POSITIONS = {"max_position_embeddings": 64, "init_std": 0.3}
_CONFIGS: dict[str, dict[str, Any]] = {
    "T5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
        "initializer_factor": 0.6,
    },
    "T5Gated": {  # as T5 1.1 and Flan: wi_0 and wi_1, and a head of its own
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
        "initializer_factor": 0.6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "Bart": _SIZES | _POSITIONS | _TOKENS,
    "MBart": _SIZES | _POSITIONS | _TOKENS | {"scale_embedding": True},
    "Marian": _SIZES | _POSITIONS | _TOKENS,
    "Whisper": {
        **(_SIZES | _TOKENS | {"max_source_positions": 12, "max_target_positions": 64}),
        "num_mel_bins": 8,
        "init_std": 0.3,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}
_CLASSES = {"Marian": "MarianMTModel"}
# What the files of real models say: mBART forces a language, BART its first and last token.
RULES: dict[str, dict[str, Any]] = {
    "T5": {},
    "T5Gated": {},
    "Bart": {"forced_bos_token_id": 0, "forced_eos_token_id": 2},
    "MBart": {"forced_bos_token_id": 77},
    "Marian": {"suppress_tokens": [5, 6, 7]},
    "Whisper": {"suppress_tokens": [*range(20, 60)], "begin_suppress_tokens": [*range(60, 90)]},
}


def save_encoder_decoder(name: str, directory: Path) -> Any:
    """Write a random model with the rules of its tokens; return it, in evaluation mode."""
    torch.manual_seed(0)
    family = name.removesuffix("Gated")
    kind = getattr(transformers, _CLASSES.get(name, f"{family}ForConditionalGeneration"))
    model = kind(getattr(transformers, f"{family}Config")(**_CONFIGS[name])).eval()
    rules: Any = transformers.GenerationConfig
    model.generation_config = rules(
        decoder_start_token_id=model.config.decoder_start_token_id,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=model.config.eos_token_id,
        **RULES[name],
    )
    model.save_pretrained(directory)
    if name == "T5":  # one of them takes text
        word_engine(directory, template=None)
    return model


def save_seq2seq_adapter(
    model: Any, directory: Path, targets: str | Sequence[str], seed: int
) -> Any:
    """Write a random adapter of rank 4, and return the model with it."""
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM",
        r=4,
        lora_alpha=8,
        target_modules=targets if isinstance(targets, str) else [*targets],
        init_lora_weights=False,
    )
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    adapted.save_pretrained(str(directory))
    return adapted.get_base_model()  # PEFT's own forward knows no features


def source_of(name: str, size: int) -> Any:
    """A source of so many token ids, or features [8, 24] by Whisper's own processor."""
    if name == "Whisper":
        wave = np.random.default_rng(size).standard_normal(16_000).astype(np.float32)
        kind: Any = WhisperFeatureExtractor  # which has no types
        processor = kind(feature_size=8, hop_length=2000, chunk_length=3)
        return processor(wave, sampling_rate=16_000, return_tensors="np").input_features[0]
    return [int(token) for token in np.arange(size) * 7 % 120 + 3]


@torch.no_grad()
def expected_logprobs(model: Any, source: Any, tokens: Sequence[int]) -> Array:
    """Log probabilities [tokens - 1, vocab] of what follows each decoder token but the last."""
    key = "input_features" if isinstance(source, np.ndarray) else "input_ids"
    given = {key: torch.tensor(np.array(source))[None]}
    logits = model(**given, decoder_input_ids=torch.tensor([list(tokens)])).logits[0, :-1]
    array: Array = logits.log_softmax(-1).numpy()
    return array


def found_logprobs(completion: Any) -> Array:
    """The log probabilities [tokens, vocab] of an answer that lists those of all tokens."""
    rows = [[of[t].logprob for t in range(VOCABULARY)] for of in completion.logprobs]
    return np.array(rows, np.float64)


class Built(NamedTuple):
    """A model on disk, its adapted forms by name, and engines of it."""

    folder: Path
    models: dict[str | None, Any]


def build_encoder_decoder(model: Path, output: Path, **options: Any) -> Path:
    """Build a small engine in float32, without a plan by default; return its directory."""
    options = {"target_modules": ("all-linear",), "flavour": "none", "dtype": "float32"} | options
    sizes: dict[str, Any] = {"max_lora_rank": 8, "max_seq_len": 64}
    build_engine(BuildConfig(model=model, output=output, **sizes, **options))
    return output


def build_t5(folder: Path) -> Built:
    """T5 with three adapters, an engine with plans of both graphs, and one for many adapters."""
    model = save_encoder_decoder("T5", folder / "model")
    models: dict[str | None, Any] = {None: model}
    for seed, (name, targets) in enumerate(TARGETS.items()):
        models[name] = save_seq2seq_adapter(model, folder / name, targets, seed)
    build_encoder_decoder(folder / "model", folder / "engine", flavour="tensorrt-rtx")
    build_encoder_decoder(folder / "model", folder / "slots", max_loras=3, max_source_len=300)
    return Built(folder, models)
