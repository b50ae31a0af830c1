"""The table of docs/adapters.md is made from the rows that tests write and read."""

from support.adapters.diffusion.file_kinds import FILE_KINDS, PAGE, page

MAKE = "make it: PYTHONPATH=tests:src .venv/bin/python -m support.adapters.diffusion.file_kinds"


def test_the_table_is_made_from_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), MAKE
    assert len({kind.title for kind in FILE_KINDS}) == len(FILE_KINDS)
