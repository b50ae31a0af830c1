"""Peers without a model: times are made up, tokens are counted up from the prompt's last."""

import os

from trt_lora.scripts.bench.peers.peer import Setup, Timed

SLOW = 2.0  # times ours


class Ours:
    """A second for a prompt, half a second for all that follows."""

    factor = 1.0

    def load(self, setup: Setup) -> None:
        """Nothing is loaded."""

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """PeerAnswer with the next number of each row."""
        self.rest = [[row[-1] + step for step in range(2, steps + 2)] for row in ids]
        return Timed(1.0 * self.factor, [[row[-1] + 1] for row in ids])

    def decode(self) -> Timed:
        """Return the numbers behind it."""
        return Timed(0.5 * self.factor, self.rest)


class Slower(Ours):
    """Twice the time, the same tokens."""

    factor = SLOW


class WithoutAdapter(Ours):
    """Other tokens from the second on."""

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """PeerAnswer with the right number, then with wrong ones."""
        first = super().prompt(ids, steps)
        self.rest = [[0] * steps for _ in ids]
        return first


class OnlyOneRow(Ours):
    """It refuses batches."""

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """Raise for two rows or more."""
        if len(ids) > 1:
            raise ValueError("one row at a time")
        return super().prompt(ids, steps)


class TooShort(Ours):
    """It stops before its time."""

    def decode(self) -> Timed:
        """Return no tokens."""
        return Timed(0.1, [[] for _ in self.rest])


class Dying(Ours):
    """Its process ends."""

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """End the process with last words."""
        os.write(2, b"out of luck\n")
        os._exit(3)
