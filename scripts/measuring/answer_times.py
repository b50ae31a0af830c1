"""Seconds of one batch of answers: to the first token of all rows, and of every token after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.serving.scheduler import Scheduler


@dataclass(frozen=True)
class AnswerTimes:
    """Seconds on the host's clock, so that a GPU's work and the host's both count."""

    first_token: float  # from the prompts to the first token of the last row
    tokens: tuple[float, ...]  # one for each step after that, which gives every row a token

    @property
    def decode(self) -> float:
        """Seconds of all steps after the first token."""
        return sum(self.tokens)


def answer_times(
    batch: Scheduler,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[str | None],
    new_tokens: int,
) -> AnswerTimes:
    """Answer greedily and without stop tokens, so that every row has as many tokens.

    Args:
        batch: has no sequence, and rows for all.
        prompts: token ids, of one length or about.
        adapters: of each prompt, as `Scheduler.submit` takes them.
        new_tokens: of each row.

    Raises:
        OutputError: logits are NaN or infinite.
    """
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
    start = perf_counter()
    pairs = zip(prompts, adapters, strict=True)
    waiting = {batch.submit(prompt, sampling, adapter=adapter) for prompt, adapter in pairs}
    while waiting:
        waiting -= _tokens(batch).keys()
    clock = [perf_counter()]
    while batch:
        _tokens(batch)
        clock.append(perf_counter())
    steps = (after - before for before, after in pairwise(clock))
    return AnswerTimes(clock[0] - start, tuple(steps))


def _tokens(batch: Scheduler) -> Mapping[int, Token]:
    """The tokens of a step, by sequence."""
    answers = batch.step()
    for error in answers.failed.values():
        raise error
    return answers.tokens
