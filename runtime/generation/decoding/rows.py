"""Sequences under way on an engine, whichever form its KV cache has."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from trt_lora.runtime.generation.next_tokens import NextTokens
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.memory.tensor import TensorMap


class Rows(Protocol):
    """Sequences by a name of the caller's, each with its prompt and its cache."""

    def add(
        self,
        row: Hashable,
        prompt: Sequence[int],
        *,
        temperature: float = 0.0,
        adapter: Lease | None = None,
        copy_of: Hashable | None = None,
    ) -> None:
        """Take a sequence in; its prompt is run with the next `step`.

        Args:
            row: its name.
            prompt: token ids.
            temperature: that its tokens are chosen with; 0 is greedy.
            adapter: of its own, where sequences have one; None is the base model.
            copy_of: a sequence with the same prompt, which need not be run twice.

        Raises:
            StateError: no row is free, or the cache grows and a step has been made.
        """
        ...

    def room(self, row: Hashable) -> int:
        """Return how many tokens may follow the prompt, once a step has been made."""
        ...

    def step(self, tokens: Mapping[Hashable, int], *, ahead: bool = False) -> NextTokens:
        """Append a token to each sequence named, and run the prompts that wait.

        Args:
            tokens: by sequence.
            ahead: the next step will probably have the greedy token of each of these sequences: it
                may be begun. Where it has others after all, it is made anew.

        Returns:
            What is found for all sequences that have no token outstanding: those of `tokens`, and
            those whose prompt was run to its end.
        """
        ...

    def remove(self, row: Hashable, *, clear: bool = False) -> None:
        """Let a sequence go; with `clear`, nothing of it may meet another one's values."""
        ...

    def clear(self) -> None:
        """Let all sequences go, whatever a step or a removal that did not end has left."""
        ...

    def use_adapter(self, tensor_map: TensorMap) -> None:
        """Take other LoRA bindings from the next step on."""
        ...
