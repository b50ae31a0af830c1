"""Versions as they are written, and as people say them."""

from pathlib import Path

import pytest

from trt_lora.scripts.diagnosis.machine import cuda_version, driver_version

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build\n"


@pytest.mark.parametrize(
    ("text", "version"), [(CLOSED, "550.54.14"), (OPEN, "580.65.06"), ("", "")]
)
def test_the_driver_says_its_version_in_a_file(text: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    assert driver_version(file) == version


def test_a_machine_without_a_driver_has_no_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path / "version") == ""
    assert cuda_version(0) == ""


def test_a_version_of_cuda_is_two_numbers() -> None:
    assert [cuda_version(number) for number in (12040, 13000)] == ["12.4", "13.0"]
