"""A second name for a loaded library, proved by the loader itself in processes of their own."""

import platform
import struct
import subprocess
import sys

import pytest

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.soname_alias import alias_obstacle, load_alias, shared_object

REAL, ALIAS = "libz.so.1", "libz_by_another_name.so"

needs_linux = pytest.mark.skipif(bool(alias_obstacle()), reason=alias_obstacle())


def python(code: str) -> str:
    """Run a program in a new process and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_linux
def test_a_loaded_library_is_found_by_its_alias() -> None:
    printed = python(f"""
import ctypes
ctypes.CDLL({REAL!r})
try:
    ctypes.CDLL({ALIAS!r})
except OSError:
    print("missing before")
from trt_lora.plugins.tensorrt.soname_alias import load_alias
load_alias({ALIAS!r}, {REAL!r})
library = ctypes.CDLL({ALIAS!r})
library.zlibVersion.restype = ctypes.c_char_p
print("version", library.zlibVersion().decode())
""")
    assert printed.startswith("missing before\nversion 1.")


@needs_linux
def test_a_need_that_is_not_loaded_is_an_error_that_names_it() -> None:
    with pytest.raises(BackendError, match=r"libno_such\.so\.7 cannot be called libany\.so: "):
        load_alias("libany.so", "libno_such.so.7")


def test_another_machine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "not riscv64" in alias_obstacle()
    with pytest.raises(BackendError, match=r"cannot be called .* not riscv64"):
        load_alias("libone.so", "libother.so")
    monkeypatch.setattr(sys, "platform", "win32")
    assert "this is win32" in alias_obstacle()


@pytest.mark.parametrize("machine", [62, 183])
def test_the_object_says_its_machine_and_holds_both_names(machine: int) -> None:
    elf = shared_object("a.so", "b.so.1", machine)
    assert elf[:4] == b"\x7fELF"
    assert struct.unpack_from("<HH", elf, 16) == (3, machine)
    assert elf.endswith(b"\0a.so\0b.so.1\0")
