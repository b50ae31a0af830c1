"""Fleet: engines that a framework serves itself, and what each adapter answers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "fleet.json"
TOKENS = 8


@dataclass(frozen=True)
class Fleet:
    """One tiny model, built for few slots and for many, with more adapters than few."""

    few: str  # an engine of 4 slots
    many: str  # one with a slot for each adapter
    folder: str  # of the adapters
    answers: dict[str, list[int]]  # of each to the prompt, in tokens; the base model's "base"
    real: str  # the engine of the demo's model, which has a slot for each of its adapters
    real_folder: str
    real_names: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write it where a framework that runs in this folder reads it."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def told_fleet() -> Fleet:
    """Return what this process was told by the file in its folder."""
    return Fleet(**json.loads(Path(FILE).read_text(encoding="utf-8")))
