"""Served: what a client is told of the server that it asks; a client's environment reads it."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "served.json"
PROMPT = "Name a fruit."
MESSAGES = [{"role": "user", "content": PROMPT}]
MOST_TOKENS = 12
FEW = {"max_tokens": MOST_TOKENS, "temperature": 0}
# Of an answer that follows a schema: a random model at temperature 0 would write blanks for ever.
TYPED = {"max_tokens": 400, "temperature": 1, "seed": 2}


@dataclass(frozen=True)
class Answer:
    """What the engine answers without HTTP, to the prompt and to the messages."""

    completion: str
    chat: str
    completion_tokens: int
    chat_tokens: int


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    address: str  # without /v1
    answers: dict[str, Answer]  # of the base model, the first one, and of each adapter
    engine: str  # its directory, in which the tokenizer lies, too
    model: str  # the checkpoint
    adapters: dict[str, str]  # the directories, by name
    others: tuple[str, ...] = ()  # addresses of servers of the same

    @property
    def url(self) -> str:
        """Where OpenAI's routes lie."""
        return f"{self.address}/v1"

    @property
    def base(self) -> str:
        """The name of the base model."""
        return next(iter(self.answers))

    def write(self, folder: Path) -> None:
        """Write it where a client that runs in this folder reads it."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def told() -> Served:
    """Return what this process was told by the file in its folder."""
    found = json.loads(Path(FILE).read_text(encoding="utf-8"))
    answers = {name: Answer(**answer) for name, answer in found.pop("answers").items()}
    return Served(answers=answers, **found)


def command(name: str) -> str:
    """Return the path of a command that the client's environment has."""
    return str(Path(sys.executable).with_name(name))
