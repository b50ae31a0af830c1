"""The next tokens of sequences, from what runs have found for them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trt_lora.runtime.engines.topk import NO_TOKEN
from trt_lora.runtime.generation.sampling import next_key
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.step_output import StepOutput
from trt_lora.runtime.generation.token import Logprobs, Token


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
        is_finite = output.is_finite()
        if not is_finite.all():
            wrong += output.select(~is_finite).sequences
            output = output.select(is_finite)
        if output.sequences:
            chosen += _of_run(output)
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


def _with_prompt(sequence: Request, token: Token) -> Token:
    """The first token of an answer brings the log probabilities of its prompt."""
    found, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return token if found is None else replace(token, prompt_logprobs=tuple(found))


def _of_run(output: StepOutput) -> Iterable[ChosenToken]:
    sequences = output.sequences
    keys = np.array([next_key(s.draws) if s.temperature else 0 for s in sequences], np.uint64)
    sampling = [sequence.sampling for sequence in sequences]
    processes = [s.process if s.changes_logits else None for s in sequences]
    tokens = output.choose(sampling, keys, processes)
    logprobs = output.logprobs(tokens, sampling)
    return map(ChosenToken, sequences, tokens.tolist(), logprobs)
