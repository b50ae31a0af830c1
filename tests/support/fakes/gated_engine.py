"""An engine with slots that makes a step only when it is let, and its directory."""

import threading
from pathlib import Path
from typing import Self

from support.eventually import SECONDS
from support.fakes.slot_engine import SlotEngine
from support.fakes.tiny_engine import engine_directory
from support.spoken_engine import give_words

from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class GatedEngine(SlotEngine):
    """Runs freely until the gate is shut; then `let` lets steps through."""

    def __init__(self, directory: Path, slots: int = 2, rows: int = 2) -> None:
        super().__init__(slots, rows)
        self.directory = give_words(engine_directory(directory, self.manifest))
        self._changed = threading.Condition()
        self._left: float = float("inf")  # steps that may be made
        self.waits = False  # a step is at the gate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def shut(self) -> None:
        """Let no further step be made."""
        self.let(0)

    def let(self, steps: float = float("inf")) -> None:
        """Let so many steps be made, and then none."""
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Run, when that is allowed."""
        with self._changed:
            self.waits = self._left < 1
            assert self._changed.wait_for(lambda: self._left >= 1, SECONDS)
            self.waits = False
            self._left -= 1
        return super().execute(tensor_map)
