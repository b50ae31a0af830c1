"""Frameworks over several engines: each has pins, a file, and its version in the page."""

from scaleout.environments import PINS
from support.doc_blocks import ROOT

FOLDER = ROOT / "tests" / "scaleout"


def test_every_framework_has_pins_and_a_file() -> None:
    assert {f"{name}_run.py" for name in PINS} == {path.name for path in FOLDER.glob("*_run.py")}
    others = [each for pins in PINS.values() for each in pins if each[0] not in ".-"]
    assert len(others) >= len(PINS)
    assert all("==" in requirement for requirement in others)


def test_make_runs_them_and_the_suite_does_not() -> None:
    assert "tests/scaleout/run_scaleout.py\n" in (ROOT / "Makefile").read_text()
    assert "make scale SCALE=" in (ROOT / ".ci" / "run").read_text()
    assert not [*FOLDER.glob("test_*.py")]
