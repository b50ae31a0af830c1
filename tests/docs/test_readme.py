"""The commands and code of the README, and of the page for many adapters, run on a real model."""

import re
import shlex
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from support.doc_blocks import ROOT, Block, blocks, build_blocks, run_block

from trt_lora.scripts.demo.__main__ import demo_config
from trt_lora.scripts.terminal.build_options import build_config, build_parser

LONGEST = 200  # lines of the README
RUN_BY_CI = ("make demo", "make test")  # .ci/run calls them; a test cannot
DOCUMENTS = ("README.md", "docs/many-adapters.md")
PRINTED: dict[str, tuple[str, ...]] = {  # by a word of the block that prints it
    "trt-lora generate": ("Arr, matey!",),
    "switch_adapters.py": ("[pirate, switched in",),
    "SamplingParams(max": ('{"answer": "',),
    "trt-lora inspect engines/smollm2 --adapter": (
        "0 not, 0 ignored; 60 of 210 sites adapted",
        "ONNX Runtime (cpu)  yes",
        "SmolLM2-135M-Instruct",
        "engines/smollm2: whole",
        "tokens/s",
    ),
    "trt-lora verify": ("the engine computes what PEFT does",),
    "convert-adapter": ("420 tensors from tests/adapters/json", "merged into"),
    "adapter_names": ("Arr",),
    "Scheduler(engine": ('{"answer": "',),
}


def executable() -> list[Block]:
    """The blocks that these tests run: all but those that something else runs."""
    return [
        block
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language
        and not any(command in block.text for command in (*RUN_BY_CI, "pip install"))
        and block not in build_blocks().values()  # conftest.py runs them
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_every_block_is_run_by_something() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command in ci for command in RUN_BY_CI)
    languages = {block.language for document in DOCUMENTS for block in blocks(document)}
    assert languages <= {"", "bash", "python"}
    assert len(executable()) == len(PRINTED)


def test_the_extras_of_the_install_commands_exist() -> None:
    (install,) = (block.text for block in blocks() if "pip install" in block.text)
    named = [name for found in re.findall(r"\[(.+?)\]", install) for name in found.split(",")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named
    assert set(named) <= set(project["optional-dependencies"])


def test_the_engine_of_the_build_command_is_that_of_make_demo() -> None:
    words = shlex.split(build_blocks()["smollm2"].text.replace("\\\n", " "))[1:]
    config = build_config(build_parser().parse_args(words))
    assert replace(config, force=False) == demo_config("auto")


@pytest.mark.slow
@pytest.mark.parametrize("word", PRINTED)
def test_a_block_runs_and_prints_what_the_reader_expects(word: str, readme_folder: Path) -> None:
    (block,) = (block for block in executable() if word in block.text)
    remove_outputs(block, readme_folder)
    printed = run_block(block, readme_folder)
    assert [text for text in PRINTED[word] if text not in printed] == []


def remove_outputs(block: Block, folder: Path) -> None:
    """Remove what the block wrote when the tests ran before: the folder stays for the next time."""
    for name in re.findall(r"build/([\w.-]+)", block.text):
        path = folder / "build" / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.is_symlink():
            path.unlink(missing_ok=True)
