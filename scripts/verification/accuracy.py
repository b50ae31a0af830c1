"""How far the answers of an engine are from those of its float model, on a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trt_lora.runtime import Engine
from trt_lora.scripts.terminal.adapters import BASE
from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.verification.logits import RANDOM_IDS, engine_logits, has_tokenizer

if TYPE_CHECKING:
    from trt_lora.scripts.verification.peft_reference import PeftReference

Float64 = npt.NDArray[np.float64]

_WINDOW, _WINDOWS = 512, 4  # tokens


@dataclass(frozen=True)
class TextAccuracy:
    """With the base model or an adapter, over all tokens of the text."""

    adapter: str
    tokens: int
    float_perplexity: float
    perplexity: float
    divergence: float  # mean of KL(float model || engine) of a token, in nats
    same_best: float  # fraction of tokens whose best successor is the float model's


def text_windows(engine: Engine, text: str | None) -> list[list[int]]:
    """Return token ids of a text, a window a row.

    Args:
        engine: without a tokenizer, random ids stand for the text.
        text: None: chapters of Python's own reference.
    """
    size = min(_WINDOW, engine.manifest.max_input_len)
    if has_tokenizer(engine):
        ids = engine.tokenizer.encode_text(_own_text() if text is None else text)
    else:
        vocabulary = engine.manifest.vocabulary_size
        ids = np.random.default_rng(0).integers(0, vocabulary, RANDOM_IDS).tolist()
    starts = range(0, min(len(ids) - 1, _WINDOW * _WINDOWS), size)
    return [ids[start : start + size] for start in starts]


def accuracy(
    engine: Engine, name: str, reference: "PeftReference", windows: Sequence[Sequence[int]]
) -> TextAccuracy:
    """Compare an engine with its float model, token by token.

    Args:
        engine: it runs, and has the adapter.
        name: of the adapter, in engine and reference; empty: the base model.
        reference: the float model, with the adapter.
        windows: token ids; each is run by itself.
    """
    divergences, same, scores = [], [], []
    for window in windows:
        ids = np.array([window], np.int64)
        theirs = _log_probs(reference.logits(name, ids, np.ones_like(ids))[0])
        ours = _log_probs(engine_logits(engine, name, ids, prompt=ids.size)[0])
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(-1))
        same.append(theirs.argmax(-1) == ours.argmax(-1))
        places = np.arange(ids.size - 1), ids[0, 1:]
        scores.append([theirs[places], ours[places]])
    float_score, score = np.concatenate(scores, axis=1).mean(axis=1)
    found = np.concatenate(divergences)
    best = float(np.concatenate(same).mean())
    perplexities = float(np.exp(-float_score)), float(np.exp(-score))
    return TextAccuracy(name, found.size, *perplexities, float(found.mean()), best)


def print_accuracy(rows: Iterable[TextAccuracy]) -> None:
    """Print a table."""
    header = ("adapter", "tokens", "perplexity", "of the float model", "KL", "same best token")
    print_table(
        header,
        [
            (row.adapter or BASE, f"{row.tokens}", f"{row.perplexity:.3f}",
             f"{row.float_perplexity:.3f}", f"{row.divergence:.4f}", f"{row.same_best:.1%}")
            for row in rows
        ],
    )  # fmt: skip


def _log_probs(logits: npt.NDArray[np.float32]) -> Float64:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _own_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("import", "execmodel", "exceptions"))
