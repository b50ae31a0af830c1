"""The pages of docs/: every block runs and prints what the reader expects; every page is listed."""

import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from architecture.sources import product_files
from conftest import TinyEngine
from support.curl_transcript import exchanges, has_shape
from support.doc_blocks import ROOT, Block, blocks, run_block
from support.eventually import eventually
from support.page_checkout import make_checkout, run_in
from support.ports import free_port, is_answered
from support.provoked_errors import PROVOKED

from trt_lora.plugins.errors import LoRAError

OTHERS = {"comparing", "many-adapters", "pipelines", "serving"}  # which other tests run
# What the blocks of a page print, in their order; commands of the shell print nothing.
PRINTED = {
    "deploying": ["", "build/shipped: whole", "bytes, all sites", "none native"],
    "building": [
        "4 sites, 11 left alone",
        "engines/vit: 4 LoRA sites",
        "4 (1, 2)",
        "the engine beside its float model",
    ],
    "answering": ["4 of 4 sites adapted", " w", " w", "8 LoRA bindings of"],
    "commands": [
        "sites adapted",
        "engines/smollm2: whole",
        "tokens/s",
        "open it in any browser",
        "8 tensors from tests/adapters/json",
        "merged into",
    ],
    "triton": [""],
    "plugin-abi": ["('x', 'slot', 'rank', 'a_0', 'b_0', 'a_1', 'b_1', 'c_0', 'c_1')"],
    "cpp": ["8 tensors from tests/adapters/json"],
    "coming-from-peft": ["engines/from-peft", " w"],
    "coming-from-tensorrt-llm": ["engines/from-trtllm", "8 tensors", "3 answers", " w"],
    "coming-from-edge-llm": ["8 tensors", "8 bindings, json"],
    "coming-from-vllm": ["Name a fruit. ->  w", " w", "[ 1 -1  0]"],
    "coming-from-max": ["LoRAStatus.SUCCESS"],
}
# What is answered to the page about serving, whose first block starts a server.
SERVED = [
    '"object":"chat.completion"',
    "data: [DONE]",
    '"object":"text_completion"',
    '"name":"letter"',
    '"pinned":false',
    "Success: LoRA adapter 'letter' removed successfully.",
]
# text: another tool's; yaml: test_scale_out_page
LANGUAGES = {"", "text", "bash", "python", "cpp", "yaml", "json"}


def pages() -> dict[str, list[Block]]:
    """The blocks of every page, by its name."""
    found = {path.stem: blocks(f"docs/{path.name}") for path in (ROOT / "docs").glob("*.md")}
    return {name: found[name] for name in sorted(found.keys() - OTHERS)}


def executable(page: str) -> list[Block]:
    """The blocks that are run here: CI runs the demo, test_inspect_engine.py counts kernels."""
    run = {"bash", "python"}
    elsewhere = ("pip install", "make demo", "--kernels")
    return [
        block
        for block in pages()[page]
        if block.language in run and not any(words in block.text for words in elsewhere)
    ]


@pytest.fixture(scope="module")
def checkout(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("pages"), tiny_engine.model, tiny_engine.engine)


def test_every_block_of_a_page_is_run_by_something() -> None:
    assert {name: len(executable(name)) for name in pages() if executable(name)} == {
        name: len(printed) for name, printed in PRINTED.items()
    }
    assert {block.language for found in pages().values() for block in found} <= LANGUAGES


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTED)
def test_the_blocks_run_in_their_order_and_print_what_the_reader_expects(
    page: str, checkout: Path
) -> None:
    for block, expected in zip(executable(page), PRINTED[page], strict=True):
        assert expected in run_in(checkout, block), block.text


@pytest.mark.slow
def test_the_server_of_the_page_about_serving_answers_what_the_page_asks(checkout: Path) -> None:
    port = str(free_port())
    found = [b for b in blocks("docs/serving.md") if b.language == "bash"]
    start, *asks = [Block(b.language, b.text.replace("8000", port)) for b in found]
    (told,) = [b for b in blocks("docs/serving.md") if b.text.startswith("$ curl")]
    program = Path(sys.executable).with_name("trt-lora")
    words = shlex.split(start.text.replace("\\\n", " "))[1:]
    with subprocess.Popen([program, *words], cwd=checkout) as server:
        try:
            ready = f"http://127.0.0.1:{port}/ready"
            assert eventually(lambda: server.poll() is not None or is_answered(ready))
            assert server.poll() is None
            for block, expected in zip(asks, SERVED, strict=True):
                assert expected in run_block(block, checkout), block.text
            for command, shown in exchanges(told):
                answer = run_block(Block("bash", command.replace("8000", port)), checkout)
                assert has_shape(answer, shown), answer
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


@pytest.mark.parametrize("name", PROVOKED)
def test_an_error_has_the_message_that_its_section_shows(
    name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(LoRAError) as caught:
        PROVOKED[name]()
    assert type(caught.value).__name__ == name
    section = sections()[name]
    assert f"`{family(type(caught.value)).__name__}`" in section
    assert f"```\n{str(caught.value).replace(f'{checkout}/', '')}\n```" in section


def test_every_error_class_has_a_section_that_says_its_cure() -> None:
    assert set(PROVOKED) == error_classes()
    for name in PROVOKED:
        assert "\nCure: " in sections()[name] or "| cure |" in sections()[name], name


def sections() -> dict[str, str]:
    """The sections of the page of errors, by their titles."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return dict(section.split("\n", 1) for section in page.split("\n## ")[1:])


def error_classes() -> set[str]:
    """The classes below LoRAError, by the text of the product."""
    texts = ((ROOT / path).read_text(encoding="utf-8") for path in product_files())
    declared = (
        found for text in texts for found in re.findall(r"^class (\w+)\((.+?)\)", text, re.M)
    )
    classes = {name: set(re.findall(r"\w+", bases)) for name, bases in declared}
    found = {"LoRAError"}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found - {"LoRAError"}


def family(error: type) -> type:
    """The built-in exception that it is too."""
    return next(c for c in error.__mro__ if c.__module__ == "builtins")


def test_the_kernels_that_the_page_shows_are_those_that_were_counted() -> None:
    (shown,) = (b.text for b in blocks("docs/building.md") if "streams" in b.text)
    rows = (re.split(" {2,}", line) for line in shown.splitlines()[1:])
    numbers = {row[0]: row[1:5] for row in rows}
    counted = (ROOT / "docs/benchmarks/kernels.md").read_text(encoding="utf-8").split("\n## ")[1]
    table = {
        cells[0]: [cell or "0" for cell in cells[1:]]
        for line in counted.splitlines()[4:8]
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])
    }
    table["without LoRA"][2] = "0.0"  # added a layer
    assert numbers == table


def test_the_c_plus_plus_of_a_page_stands_in_the_program() -> None:
    program = (ROOT / "examples" / "cpp" / "bind_adapter.cpp").read_text()
    quoted = [b.text for found in pages().values() for b in found if b.language == "cpp"]
    assert len(quoted) == 3
    assert [text for text in quoted if text not in program] == []


def test_the_extras_that_pages_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = {
        n
        for text in texts
        for found in re.findall(r"(?:trt-lora|trt_lora-\*\.whl\))\[([a-z,]+)\]", text)
        for n in found.split(",")
    }
    assert named
    assert named <= set(project["optional-dependencies"])


def test_the_site_has_every_page_and_pages_link_to_nothing_outside() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").as_posix()
        assert f" {page}\n" in listed
        outside = "../" * (page.count("/") + 1)
        assert f"]({outside}" not in path.read_text(encoding="utf-8"), page
