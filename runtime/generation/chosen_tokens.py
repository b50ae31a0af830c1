"""What runs have found for sequences, and the next tokens that are chosen from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from trt_lora.plugins.errors import OutputError
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import NO_TOKEN, Mask, Tokens, TopK
from trt_lora.runtime.generation.logits.logprobs import logprobs_of
from trt_lora.runtime.generation.sampling import choose, next_key
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.token import Logprobs, Token


@dataclass(frozen=True)
class StepOutput:
    """What a run has found for n sequences; it is looked at before the next step.

    Whole rows of logits are fetched only where something needs them: where they are changed, where
    candidates are too few, and for log probabilities beyond these.
    """

    sequences: tuple[Any, ...]
    topk: TopK

    def select(self, which: Mask) -> "StepOutput":
        """Return that of some of the sequences."""
        places = np.flatnonzero(which).tolist()
        some = tuple(self.sequences[place] for place in places)
        return StepOutput(some, self.topk.select(places))


class ChosenToken(NamedTuple):
    """The next token of a sequence, which has not taken it yet."""

    sequence: Request
    token: int  # `NO_TOKEN` where none can be chosen
    logprobs: Logprobs | None

    @property
    def is_last(self) -> bool:
        """Whether the sequence is known to end with it."""
        stops = self.sequence.stop_token_ids
        return self.sequence.left <= 1 or self.token == NO_TOKEN or self.token in stops


def choose_tokens(outputs: Iterable[StepOutput]) -> tuple[list[ChosenToken], list[Request]]:
    """Choose the next token of each sequence; return those with logits that are not finite, too."""
    chosen, wrong = list[ChosenToken](), list[Request]()
    for output in outputs:
        is_finite = output.topk.is_finite()
        if not is_finite.all():
            wrong += output.select(~is_finite).sequences
            output = output.select(is_finite)
        if output.sequences:
            tokens = _choose(output.sequences, output.topk)
            wanted = [sequence.sampling.listed_logprobs for sequence in output.sequences]
            logprobs = logprobs_of(output.topk, tokens, wanted)
            chosen += map(ChosenToken, output.sequences, tokens.tolist(), logprobs)
    return chosen, wrong


def append_tokens(chosen: Sequence[ChosenToken]) -> list[Token]:
    """Let each sequence take its token; where there is none, note its failure."""
    results = []
    for sequence, token, logprobs in chosen:
        if token == NO_TOKEN:
            sequence.failure = "its parameters forbid every token that could come next"
        else:
            results.append(_with_prompt(sequence, sequence.append(token, logprobs)))
    return results


def non_finite_logits(sequences: Sequence[Request]) -> OutputError:
    """Return the error of sequences whose logits are NaN or infinite."""
    numbers = [sequence.id for sequence in sequences]
    names = dict.fromkeys(sequence.adapter for sequence in sequences)
    adapters = ", ".join(f"adapter {name!r}" if name else "no adapter" for name in names)
    return OutputError(
        f"the logits of prompt {', '.join(map(str, numbers))} are NaN or infinite with {adapters}"
        ": a value left the engine's number range; use a lower strength, or build with --dtype "
        "float32 or bfloat16",
        numbers,
    )


def grammar_exhausted(sequence: Request) -> OutputError:
    """Return the error of a sequence whose structured output became too large to follow."""
    return OutputError(
        f"the structured output of prompt {sequence.id} cannot go on: {sequence.error}; simplify "
        "what structured_outputs asks for",
        [sequence.id],
    )


def _with_prompt(sequence: Request, token: Token) -> Token:
    """The first token of an answer brings the log probabilities of its prompt."""
    found, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return token if found is None else replace(token, prompt_logprobs=tuple(found))


def _choose(sequences: Sequence[Request], topk: TopK) -> Tokens:
    """One token of each, `NO_TOKEN` where bias, penalties and grammar leave none to choose."""
    keys = np.array([next_key(s.draws) if s.temperature else 0 for s in sequences], np.uint64)
    sampling = [sequence.sampling for sequence in sequences]
    is_changed = np.array([sequence.changes_logits for sequence in sequences])
    if not is_changed.any():
        return choose(topk, sampling, keys)
    tokens = np.empty(len(sequences), np.int64)
    if plain := np.flatnonzero(~is_changed).tolist():
        tokens[plain] = choose(topk.select(plain), [sampling[at] for at in plain], keys[plain])
    changed = np.flatnonzero(is_changed).tolist()
    rows = zip(changed, topk.logits(changed), strict=True)
    logits = np.stack([sequences[place].process(row) for place, row in rows])
    tokens[changed] = choose(HostTopK(logits), [sampling[at] for at in changed], keys[changed])
    return tokens
