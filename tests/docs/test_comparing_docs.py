"""The commands of docs/comparing.md run as they stand, on the engine of a small model."""

import shutil
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.compare_command import forked_processes
from support.doc_blocks import ROOT, Block, blocks, run_block
from support.page_checkout import make_checkout, run_in
from support.processes import without_torch

from trt_lora.scripts.comparison.files import load_accuracy

DOCUMENT = "docs/comparing.md"
RUN_BY_CI = "make demo"  # test_readme.py checks that it does; a test cannot
# What tells a block from the others, in the order of the document, and what it prints.
PRINTED = {
    "export PATH": "",
    "--keep build/compared\n": "tolerance 0.001, relative 0.0001; kept in build/compared\n",
    "--against native": "native: ",
    "--against engines/previous": "an equal file, ONNX Runtime",
    "polygraphy run engines/smollm2/model.onnx --onnxrt --lora-float64": "Pass Rate: 100.00%",
    "--data-loader-script": "PASSED | Runtime",
    "tar -czf": "",
    "sh commands.sh": "Pass Rate: 100.00%",
    "polygraphy check": "PASSED | Accuracy results passed the requested thresholds",
}


def executable() -> list[Block]:
    """The blocks that are commands, in their order."""
    return [b for b in blocks(DOCUMENT) if b.language and RUN_BY_CI not in b.text]


def test_every_command_is_in_the_list_and_three_make_a_comparison() -> None:
    commands = [block for block in blocks(DOCUMENT) if block.language]
    assert {block.language for block in commands} == {"bash"}
    assert RUN_BY_CI in commands[0].text
    assert "trt-lora compare" in commands[2].text
    for word, block in zip(PRINTED, executable(), strict=True):
        assert word in block.text


@pytest.fixture(scope="module")
def checkout(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout after `make demo`, and one more engine."""
    folder = tmp_path_factory.mktemp("comparing")
    make_checkout(folder, tiny_engine.model, tiny_engine.engine)
    shutil.copytree(folder / "engines" / "smollm2", folder / "engines" / "previous")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


@pytest.mark.slow
def test_the_commands_run_in_their_order_and_print_what_the_reader_expects(checkout: Path) -> None:
    kept = [checkout / "build" / name for name in ("compared", "compared-native")]
    accuracy = kept[1] / "accuracy" / "json.json"
    found = []
    for word, block in zip(PRINTED, executable(), strict=True):
        if "sh commands.sh" in word:
            found = load_accuracy(accuracy).errors
            accuracy.unlink()
        assert PRINTED[word] in run(checkout, block, "--against" in word), word
    names = {"accuracy", "commands.sh", "inputs", "logs", "manifest.json", "outputs", "report.json"}
    assert [{path.name for path in folder.iterdir()} for folder in kept] == [names] * 2
    assert load_accuracy(accuracy).errors == found != []
    commands = (kept[1] / "commands.sh").read_text().partition("\n\n")[2]
    assert str(checkout) not in commands  # so that the folder may lie anywhere
    named = [path for path in checkout.iterdir() if path.name.startswith("compare-smollm2-other-")]
    assert len(named) == 1


def run(checkout: Path, block: Block, in_forks: bool) -> str:
    if not in_forks:
        return run_block(block, checkout, without_torch())
    with forked_processes():
        return run_in(checkout, block)
