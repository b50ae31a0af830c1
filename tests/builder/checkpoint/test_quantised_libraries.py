"""Libraries that made the quantised fixtures: each is pinned where `make formats` installs it."""

from formats.environments import PINS
from support.doc_blocks import ROOT
from support.models.quantised import GGUFS, NAMES, library_of

FOLDER = ROOT / "tests" / "formats"


def test_every_library_has_pins_and_a_file() -> None:
    assert {f"{name}_library.py" for name in PINS} == {p.name for p in FOLDER.glob("*_library.py")}
    assert all("==" in pin or pin == "--no-deps" for pins in PINS.values() for pin in pins)


def test_every_fixture_is_of_a_version_that_is_pinned() -> None:
    pinned = {pin.replace("==", " ") for pins in PINS.values() for pin in pins}
    assert {library_of(name) for name in (*NAMES, *GGUFS)} <= pinned


def test_make_runs_them_and_the_suite_does_not() -> None:
    assert "tests/formats/run_formats.py\n" in (ROOT / "Makefile").read_text()
    assert not [*FOLDER.glob("test_*.py")]
