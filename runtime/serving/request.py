"""A request: a prompt that waits for its answer, or for the rest of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trt_lora.plugins.checked import checked
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt with its adapter and its place in the queue."""

    id: int  # ascends in the order of arrival
    adapter: str | None  # None: the base model
    prompt: tuple[int, ...]  # token ids; behind them those that are answered already
    sampling: SamplingParams
    most_answered: int  # tokens that its whole answer may have
    arrival: int  # the number of the step before which it came
    answered: int = 0  # how many tokens at the end of `prompt` are its answer so far
    generation: int | None = None  # of the adapter that gave them; None: nobody has

    @property
    def most_tokens(self) -> int:
        """How many more tokens its answer may have."""
        return self.most_answered - self.answered

    @checked
    def behind(self, tokens: Sequence[int], generation: int | None) -> "Request":
        """Return the rest of the request behind more tokens of its answer.

        Args:
            tokens: that it was given since it joined.
            generation: of the adapter that gave them; None is the base model.
        """
        if not tokens:
            return self
        return replace(
            self,
            prompt=(*self.prompt, *tokens),
            answered=self.answered + len(tokens),
            generation=generation,
        )
