"""Compare the logits of an engine with PEFT's, prompt by prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trt_lora.runtime import Engine, SamplingParams, TensorMap
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.scripts.terminal.adapters import BASE
from trt_lora.scripts.terminal.console import print_table

if TYPE_CHECKING:
    from trt_lora.scripts.verification.peft_reference import PeftReference

RANDOM_IDS = 24  # tokens, where the engine has no tokenizer


@dataclass(frozen=True)
class LogitRow:
    """One prompt with the base model or the adapter."""

    prompt: str
    adapter: str
    positions: int
    largest: float
    mean: float
    same_best: float  # fraction of positions whose best token is PEFT's


def compared_logits(
    engine: Engine,
    adapter: str,
    reference: "PeftReference",
    prompts: Sequence[str],
    length: int,
    turn: Callable[[str, int, int], object],
) -> Iterator[LogitRow]:
    """Yield a row for every prompt, with the base model and with an adapter.

    Args:
        engine: it runs, and has the adapter.
        adapter: its name, in engine and reference.
        reference: the same model and adapter.
        prompts: text; where the engine takes none, random ids stand for each.
        length: tokens of the answers that are compared, most.
        turn: called before each row with what it is, how many there are before it, and in all.
    """
    for number, prompt in enumerate(prompts):
        for place, name in enumerate(("", adapter)):
            said = f"prompt {number + 1} of {len(prompts)} with {name or BASE}"
            turn(said, 2 * number + place, 2 * len(prompts))
            ids = _prompt_and_answer(engine, name, prompt, length, seed=number)
            ours = engine_logits(engine, name, ids, prompt=ids.shape[1] // 2)
            theirs = reference.logits(name, ids, np.ones_like(ids))
            error = np.abs(ours - theirs)
            same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
            yield LogitRow(prompt, name, ids.size, float(error.max()), float(error.mean()), same)


def _prompt_and_answer(engine: Engine, name: str, prompt: str, length: int, *, seed: int) -> Ids:
    """The prompt with the adapter's answer to it, [1, s]; random ids without a tokenizer."""
    if not has_tokenizer(engine):
        count = min(RANDOM_IDS, engine.manifest.max_input_len)
        return np.random.default_rng(seed).integers(0, engine.manifest.vocabulary_size, (1, count))
    sampling = SamplingParams(max_tokens=length, temperature=0)
    answer = engine.generate(prompt, adapter=name or None, sampling=sampling)
    return np.array([[*engine.tokenizer.encode(prompt), *answer.token_ids]], np.int64)


def has_tokenizer(engine: Engine) -> bool:
    """Return whether an engine takes text."""
    return (engine.directory / "tokenizer.json").is_file()


def engine_logits(engine: Engine, name: str, ids: Ids, *, prompt: int) -> Logits:
    """Return logits [batch, s, vocab] of ids [batch, s].

    The first `prompt` positions go through prefill, the others one by one through decode.
    """
    tensor_map = engine.adapters.bindings.rows([name or None])
    return np.stack(forced_logits(engine, tensor_map, ids.tolist(), ids.shape[1] - prompt))


def forced_logits(
    engine: Engine, tensor_map: TensorMap, rows: Sequence[Sequence[int]], decoded: int
) -> list[Logits]:
    """Return logits [tokens, vocab] of every token of every row.

    Args:
        engine: it runs.
        tensor_map: holds its LoRA bindings.
        rows: token ids; their lengths may differ.
        decoded: tokens at the end of each row that are decoded, all rows together. The others are
            prompts, each of which is run by itself.
    """
    decoder = StaticDecoder(engine, tensor_map, len(rows))
    found = []
    for place, row in enumerate(rows):
        decoder.cache.admit(place)
        prompt = np.array([row[: len(row) - decoded]], np.int64)
        found.append([decoder.run(prompt, first=place, kept=np.arange(prompt.size))])
    for step in range(-decoded, 0):
        for place, logits in enumerate(decoder.decode(np.array([row[step] for row in rows]))):
            found[place].append(logits[None].copy())
    return [np.concatenate(parts) for parts in found]


def print_logits(rows: Iterable[LogitRow]) -> None:
    """Print a table."""
    header = ("prompt", "adapter", "positions", "max |error|", "mean |error|", "same best token")
    print_table(
        header,
        [
            (row.prompt[:40], row.adapter or BASE, f"{row.positions}", f"{row.largest:.2e}",
             f"{row.mean:.2e}", f"{row.same_best:.1%}")
            for row in rows
        ],
    )  # fmt: skip


def logit_problems(rows: Iterable[LogitRow], limit: float) -> list[str]:
    """Return a line for every row beyond the tolerance."""
    return [
        f"a logit of {row.prompt[:40]!r} with {row.adapter or BASE} is off by {row.largest:.2e}, "
        f"beyond the tolerance of {limit}"
        for row in rows
        if not row.largest <= limit  # NaN is beyond it too
    ]
