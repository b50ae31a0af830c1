"""The commands and code of the README, and of the page for many adapters, run on a real model."""

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.doc_blocks import ROOT, Block, blocks, build_blocks
from support.page_checkout import make_checkout, run_in

from trt_lora.scripts.demo.__main__ import demo_config
from trt_lora.scripts.terminal.build_options import build_config, build_parser

LONGEST = 200  # lines of the README
RUN_BY_CI = ("make demo", "make test")  # .ci/run calls them; a test cannot
DOCUMENTS = ("README.md", "docs/many-adapters.md")
PRINTED: dict[str, tuple[str, ...]] = {  # by a word of the block that prints it
    "trt-lora generate": ("Arr, matey!",),
    "switch_adapters.py": ("[pirate, switched in",),
    "engine.stream(": ('{"answer": "', "Arr"),
    "SamplingParams(max": ('{"answer": "',),
    '"letter", "pirate", None]': ("Arr",),
    "EngineLoop(": ('{"answer": "',),
}
SMALL: dict[str, tuple[str, ...]] = {  # the same of those that run on a small random model
    "trt-lora inspect engines/smollm2 --adapter": (
        "0 not, 0 ignored; 4 of 4 sites adapted",
        "ONNX Runtime (cpu)  yes",
        "json",
        "engines/smollm2: whole",
        "tokens/s",
    ),
    "trt-lora verify": ("the engine computes what PEFT does",),
    "convert-adapter": ("8 tensors from tests/adapters/json", "merged into"),
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
    assert len(executable()) == len(PRINTED) + len(SMALL)


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
    printed = run_in(readme_folder, block)
    assert [text for text in PRINTED[word] if text not in printed] == []


@pytest.fixture(scope="module")
def small_folder(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout after `make demo`, around a small random model."""
    return make_checkout(tmp_path_factory.mktemp("readme"), tiny_engine.model, tiny_engine.engine)


@pytest.mark.slow
@pytest.mark.parametrize("word", SMALL)
def test_a_block_runs_on_a_small_model(word: str, small_folder: Path) -> None:
    (block,) = (block for block in executable() if word in block.text)
    printed = run_in(small_folder, block)
    assert [text for text in SMALL[word] if text not in printed] == []
