"""Peers without a model: times are made up, tokens are counted up from the prompt's last."""

import os

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup

SLOW = 2.0  # times ours


class Ours:
    """A second for a prompt, half a second for all that follows."""

    factor = 1.0

    def load(self, setup: Setup) -> None:
        """Nothing is loaded."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Count up from the last number of each row."""
        tokens = [[row[-1] + step for step in range(1, steps + 2)] for row in ids]
        return PeerAnswer(1.0 * self.factor, 0.5 * self.factor, tokens)


class Slower(Ours):
    """Twice the time, the same tokens."""

    factor = SLOW


class WithoutAdapter(Ours):
    """Other tokens from the second on."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Give the right number, then wrong ones."""
        right = super().answer(ids, steps)
        return right._replace(tokens=[[row[0], *[0] * steps] for row in right.tokens])


class OnlyOneRow(Ours):
    """It refuses batches."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Raise for two rows or more."""
        if len(ids) > 1:
            raise ValueError("one row at a time")
        return super().answer(ids, steps)


class TooShort(Ours):
    """It stops before its time."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Give one token alone."""
        return super().answer(ids, 0)


class Dying(Ours):
    """Its process ends."""

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """End the process with last words."""
        os.write(2, b"out of luck\n")
        os._exit(3)
