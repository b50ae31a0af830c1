"""Start-up times: commands end, failures are shown, and the table has a column an environment."""

import sys
from pathlib import Path

import pytest

from trt_lora.scripts.bench.first_hour.__main__ import TimedCommand, markdown, seconds_of_command
from trt_lora.scripts.measuring.seconds import Seconds

BIN = Path(sys.executable).parent


def test_a_command_is_told_the_engine_and_what_is_said_and_its_processors_are_counted() -> None:
    program = "import sys; assert sys.argv[1] == '/e' and input() == 'hello'; sum(range(10**6))"
    taken = seconds_of_command(
        TimedCommand("", ("python", "-c", program, "ENGINE"), "hello\n"), BIN, Path("/e")
    )
    assert taken.wall > 0
    assert taken.processors > 0


def test_a_command_that_fails_is_no_time() -> None:
    with pytest.raises(RuntimeError, match="no such engine"):
        seconds_of_command(
            TimedCommand("", ("python", "-c", "exit('no such engine')")), BIN, Path("/e")
        )


def test_the_table_has_wall_seconds_and_those_of_the_processors() -> None:
    found = {"help": {"old": Seconds(1.0, 0.5), "new": Seconds(0.25, 0.125)}}
    assert markdown(found) == (
        "|  | old | new |\n| --- | --- | --- |\n| help | 1.00 (0.50) | 0.25 (0.12) |\n"
    )
