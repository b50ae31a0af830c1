"""The README's commands and code run as they stand."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from support.doc_blocks import ROOT, Block, blocks, build_blocks, run_block

RUN_BY_CI = ("make demo", "make test")  # .ci/run calls them; a test cannot
PRINTED = {
    "--dry-run": "60 sites, 151 left alone",
    "switch_adapters.py": "[pirate, switched in",
    "trt-lora generate": "Arr, matey!",
    "SamplingParams(max": '{"answer": "',
    "engine.execute": "420 LoRA bindings of 484 inputs",
    "manager.blend": "60 of 210 sites adapted",
    "prefill_chunk": "Arr, matey!",
    "adapter_names": "Arr",
    "Scheduler(engine": '{"answer": "',
    "--kernels": "393    120            4.0                  0",
    "inspect engines/readme --adapter": "0 not, 0 ignored; 60 of 210 sites adapted",
    "trt-lora doctor": "ONNX Runtime (cpu)  yes",
    "trt-lora list": "SmolLM2-135M-Instruct",
    "trt-lora bench": "tokens/s",
    "trt-lora report": "open it in any browser",
    "trt-lora check": "engines/readme: whole",
    "trt-lora verify": "the engine computes what PEFT does",
    "convert-adapter": "420 tensors from tests/adapters/json",
}


def executable() -> list[Block]:
    """The blocks that these tests run: all but those that something else runs."""
    return [
        block
        for block in blocks()
        if block.language
        and not any(command in block.text for command in (*RUN_BY_CI, "pip install"))
        and block not in build_blocks().values()  # conftest.py runs them
    ]


def test_every_block_is_run_by_something() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command in ci for command in RUN_BY_CI)
    languages = {block.language for block in blocks()}
    assert languages <= {"", "bash", "python"}
    assert len(executable()) == len(PRINTED)


def test_the_extras_of_the_install_command_exist() -> None:
    (install,) = (block.text for block in blocks() if "pip install" in block.text)
    named = install.split("[")[1].split("]")[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(named) <= set(project["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.parametrize("word", PRINTED)
def test_a_block_runs_and_prints_what_the_reader_expects(word: str, readme_folder: Path) -> None:
    (block,) = (block for block in executable() if word in block.text)
    remove_outputs(block, readme_folder)
    assert PRINTED[word] in run_block(block, readme_folder)


def remove_outputs(block: Block, folder: Path) -> None:
    """Remove what the block wrote when the tests ran before: the folder stays for the next time."""
    for name in re.findall(r"build/([\w.-]+)", block.text):
        path = folder / "build" / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.is_symlink():
            path.unlink(missing_ok=True)
