"""Sequences under way on an engine, whichever form its KV cache has."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.tensor import TensorMap


class RowLogits(NamedTuple):
    """Logits [n, vocab] of the next token of n sequences."""

    rows: tuple[Hashable, ...]
    logits: Logits


class Rows(Protocol):
    """Sequences by a name of the caller's, each with its prompt and its cache."""

    def add(self, row: Hashable, prompt: Sequence[int]) -> None:
        """Take a sequence in; its prompt is run with the next `step`.

        Raises:
            StateError: no row is free, or the cache grows and a step has been made.
        """
        ...

    def room(self, row: Hashable) -> int:
        """Return how many tokens may follow the prompt, once a step has been made."""
        ...

    def step(self, tokens: Mapping[Hashable, int]) -> RowLogits:
        """Append a token to each sequence named, and run the prompts that wait.

        Returns:
            The logits of all sequences that have none outstanding: those of `tokens`, and those
            whose prompt was run to its end.
        """
        ...

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Let a sequence go; with `clear`, nothing of it may meet another one's values."""
        ...

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings from the next step on."""
        ...
