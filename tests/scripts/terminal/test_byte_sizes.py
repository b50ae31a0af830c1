"""Sizes in the unit in which they have digits to show."""

import pytest

from trt_lora.scripts.terminal.printing import byte_size


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (49_152, "49.2 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (541_200_000, "541.2 MB"),
        (16_060_000_000, "16.1 GB"),
        (3_000_000_000_000, "3000.0 GB"),
    ],
)
def test_a_size_has_a_digit_behind_the_point(nbytes: int, shown: str) -> None:
    assert byte_size(nbytes) == shown
