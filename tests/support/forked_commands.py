"""Commands of Python in forks of a process that has imported what they need: a tenth of the time.

They stand in for `subprocess.run` where the process itself is not what is tested.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["polygraphy.tools._main", "onnxruntime", "onnx_ir"])


def run_forked(
    argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path = Path(), **_: object
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m MODULE ...`, `python SCRIPT ...` or `SCRIPT ...`; return what it printed."""
    words = [str(word) for word in argv if word != sys.executable]
    with TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        process = _FORKS.Process(target=_run, args=(words, cwd.resolve(), dict(env), printed))
        process.start()
        process.join()
        text = printed.read_text(encoding="utf-8")
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, text)


# What takes the place of the module `subprocess`.
FORKED: Any = SimpleNamespace(run=run_forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


def _run(words: list[str], cwd: Path, env: dict[str, str], printed: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    file = os.open(printed, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    run: Any = runpy.run_module if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")
