"""polygraphy as `trt-lora compare` uses it: as commands."""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import BackendError

MINIMUM = (0, 53, 6)  # saves the result of a comparison; an older one only prints it
PYTHON, POLYGRAPHY = "python", "polygraphy"
_ERRORS = ("error:", "[!]")  # how a command of ours, and of polygraphy's, begins the last line
_TOOLS = {POLYGRAPHY: "polygraphy", "onnxruntime": "cpu", "onnx_ir": "export"}  # and its extra


def require_tools() -> None:
    """Check that what the commands need is there.

    Raises:
        BackendError: polygraphy, or what it runs, is not installed, or polygraphy is too old.
    """
    for tool, extra in _TOOLS.items():
        if importlib.util.find_spec(tool) is None:
            raise BackendError(
                f"compare needs {tool}, which is not installed; pip install 'trt-lora[{extra}]'"
            )
    version = importlib.metadata.version(POLYGRAPHY)
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < MINIMUM:
        raise BackendError(
            f"polygraphy is {version}, compare needs {'.'.join(map(str, MINIMUM))} or later; "
            "pip install 'trt-lora[polygraphy]'"
        )


@dataclass(frozen=True)
class Command:
    """A command as a person would type it; words may begin with a place, such as `$ENGINE`."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """Return it for a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*words, *(_quoted(word) for word in self.words)])

    def argv(self, places: Mapping[str, Path]) -> list[str]:
        """Return it for this machine, with the places filled in."""
        program, *rest = self.words
        return [_program(program), *(_filled(word, places) for word in rest)]


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)


def _filled(word: str, places: Mapping[str, Path]) -> str:
    if not word.startswith("$"):
        return word
    name, slash, rest = word[1:].partition("/")
    return f"{places[name]}{slash}{rest}"


def _program(name: str) -> str:
    """The program of this environment, whatever the PATH says."""
    if name == PYTHON:
        return sys.executable
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise BackendError(f"there is no program {name}; pip install 'trt-lora[{name}]'")
    return found


def python_command(module: str, *words: str) -> Command:
    """Return the command that runs a module of this folder."""
    return Command((PYTHON, "-m", f"trt_lora.scripts.comparison.{module}", *words))


def run_command(command: Command, folder: Path, places: Mapping[str, Path], log: Path) -> None:
    """Run a command in `folder`; what it prints is added to `log`.

    Args:
        command: what to run; its last word is the file that it writes.
        folder: where; `log` is relative to it too.
        places: what its places stand for.
        log: file for what it prints.

    Raises:
        BackendError: the file is not there afterwards; the message ends with what it printed last.
            polygraphy's exit status alone does not tell a difference from an error.
    """
    expected = command.words[-1]
    (folder / expected).unlink(missing_ok=True)
    for path in (folder / expected, folder / log):
        path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command.argv(places),
        cwd=folder,
        env={**os.environ, **dict(command.environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with (folder / log).open("a", encoding="utf-8") as file:
        file.write(f"$ {command.text()}\n{done.stdout}")
    if not (folder / expected).is_file():
        raise BackendError(
            f"{_reason(done.stdout)}; `{command.text()}` exited with {done.returncode}, and what "
            f"it printed is in {folder / log}"
        )


def _reason(printed: str) -> str:
    """The last error of ours or of polygraphy, or else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(_ERRORS)]
    reason = (errors or lines or ["nothing was printed"])[-1]
    return next((reason.removeprefix(e).strip() for e in _ERRORS if reason.startswith(e)), reason)
