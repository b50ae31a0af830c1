"""Clients that nobody here wrote: each has pins, a file, and its command in the page."""

from clients.environments import PINS
from support.curl_transcript import has_shape
from support.doc_blocks import ROOT

FOLDER = ROOT / "tests" / "clients"


def test_every_client_has_pins_and_a_file() -> None:
    assert {f"{name}_client.py" for name in PINS} == {p.name for p in FOLDER.glob("*_client.py")}
    assert all("==" in requirement for pins in PINS.values() for requirement in pins)


def test_the_page_has_the_command_of_every_client() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for (requirement,) in PINS.values():
        name, version = requirement.split("==")
        assert f"\n| {name.removesuffix('[api]')} {version} | `" in page, requirement


def test_make_runs_them_and_the_suite_does_not() -> None:
    assert "tests/clients/run_clients.py\n" in (ROOT / "Makefile").read_text()
    assert "make clients CLIENTS=" in (ROOT / ".ci" / "run").read_text()
    assert not [*FOLDER.glob("test_*.py")]


def test_the_shape_of_an_answer_is_seen() -> None:
    shown = '{"id": "x", "choices": [{"n": 1}], "none": null}'
    assert has_shape('{"id": "y", "choices": [{"n": 2}], "more": 1}', shown)
    for other in ('{"id": 1, "choices": [{"n": 2}]}', '{"id": "y", "choices": [{}]}', "x"):
        assert not has_shape(other, shown)
    assert has_shape("data: [DONE]", "data: [DONE]")
    assert not has_shape("data: [DONE]", "Success")
