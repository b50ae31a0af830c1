"""The next tokens of sequences, from what a run has found for them."""

import numpy as np

from trt_lora.runtime.generation.next_tokens import NextTokens
from trt_lora.runtime.generation.sampling import UNDECIDED, next_keys
from trt_lora.runtime.generation.token import Token


def chosen_tokens(found: NextTokens) -> list[Token]:
    """Choose and append the next token of each sequence; where there is none, note its failure."""
    sequences = found.rows
    if not sequences:
        return []
    keys = np.concatenate([next_keys(sequence.draws) for sequence in sequences])
    sampling = [sequence.sampling for sequence in sequences]
    processes = [s.process if s.changes_logits else None for s in sequences]
    chosen = found.choose(sampling, keys, processes)
    logprobs = found.logprobs(chosen, sampling)
    results = []
    for sequence, token, known in zip(sequences, chosen.tolist(), logprobs, strict=True):
        if token == UNDECIDED:
            sequence.failure = "its parameters forbid every token that could come next"
        else:
            results.append(sequence.append(token, known))
    return results
