"""What a run has found for sequences: their next tokens are chosen from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.topk import Logits, Mask, Tokens, TopK
from trt_lora.runtime.generation.logits.logprobs import logprobs_of
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.race import Keys
from trt_lora.runtime.generation.sampling import choose
from trt_lora.runtime.generation.token import Logprobs

Process = Callable[[Logits], Logits]  # a sequence's bias, penalties and grammar, on all its logits
Processes = Sequence[Process | None]  # [n], None where its tokens are chosen from raw logits


@dataclass(frozen=True)
class StepOutput:
    """What a run has found for n sequences; it is looked at before the next step.

    Whole rows of logits are fetched only where something needs them: where they are changed, where
    candidates are too few, and for log probabilities beyond these.
    """

    sequences: tuple[Any, ...]
    topk: TopK

    def is_finite(self) -> Mask:
        """Return which have logits that are all finite [n]."""
        return self.topk.is_finite()

    def select(self, which: Mask) -> "StepOutput":
        """Return that of some of the sequences."""
        places = np.flatnonzero(which).tolist()
        some = tuple(self.sequences[place] for place in places)
        return StepOutput(some, self.topk.select(places))

    def choose(
        self, sampling: Sequence[SamplingParams], keys: Keys, processes: Processes = ()
    ) -> Tokens:
        """Return one token of each [n], all of which are finite; see `sampling.choose`.

        It is `NO_TOKEN` where its process has left no token to choose.
        """
        changed = {place: p for place, p in enumerate(processes) if p is not None}
        if not changed:
            return choose(self.topk, sampling, keys)
        tokens = np.empty(len(sampling), np.int64)
        if plain := [place for place in range(len(sampling)) if place not in changed]:
            some = [sampling[place] for place in plain]
            tokens[plain] = choose(self.topk.select(plain), some, keys[plain])
        pairs = zip(self.topk.logits([*changed]), changed.values(), strict=True)
        logits = np.stack([process(row) for row, process in pairs])
        some = [sampling[place] for place in changed]
        tokens[[*changed]] = choose(HostTopK(logits), some, keys[[*changed]])
        return tokens

    def logprobs(self, tokens: Tokens, sampling: Sequence[SamplingParams]) -> list[Logprobs | None]:
        """Return the log probabilities of each [n] that asks for them; `tokens` are the chosen."""
        return logprobs_of(self.topk, tokens, [params.logprobs for params in sampling])
