"""Second soname for a loaded shared library; no compiler, file or environment variable.

TensorRT-RTX 1.7.1's ONNX parser calls dlopen("libtensorrt_rtx.so") when it meets a plugin, the
wheel ships only libtensorrt_rtx.so.1, and the process ends with "terminate called without an active
exception". glibc looks for a bare name among the SONAMEs that are loaded already: a shared object
of 441 bytes, whose SONAME is the missing name and whose only need is the library, is enough.

Format: the System V ABI's ELF-64, and its dynamic section.
"""

import ctypes
import functools
import os
import platform
import struct
import sys

from trt_lora.plugins.errors import BackendError

_MACHINES = {"x86_64": 62, "aarch64": 183}  # EM_X86_64, EM_AARCH64
_PAGE = 0x10000  # the largest page of either

_HEADER, _PROGRAM_HEADER, _DYNAMIC_ENTRY, _SYMBOL, _HASH = 64, 56, 16, 24, 16  # bytes of each
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ, _WRITE = 4, 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = (
    *(1, 4, 5, 6, 10, 11),
    14,
)


def alias_obstacle() -> str:
    """Reason why no alias can be made on this machine; empty if one can."""
    if sys.platform != "linux":
        return f"library names are only mended on Linux, and this is {sys.platform}"
    if platform.machine() not in _MACHINES:
        return f"library names are mended on {' and '.join(_MACHINES)}, not {platform.machine()}"
    return ""


@functools.cache  # a library is loaded once in a process, and stays
def load_alias(soname: str, needed: str) -> None:
    """Make `soname` another name of the library `needed`, which is loaded already.

    Raises:
        BackendError: this machine's loader is another than Linux's, or refuses.
    """
    if obstacle := alias_obstacle():
        raise BackendError(f"{needed} cannot be called {soname}: {obstacle}")
    # Never closed: the loader takes a path that it knows for the same library.
    handle = os.memfd_create(soname)
    os.write(handle, shared_object(soname, needed, _MACHINES[platform.machine()]))
    try:
        ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError as error:
        raise BackendError(f"{needed} cannot be called {soname}: {error}") from error


def shared_object(soname: str, needed: str, machine: int) -> bytes:
    """Return an ELF-64 shared object with nothing in it but a name and a need."""
    strings = b"\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    dynamic_at = _HEADER + 3 * _PROGRAM_HEADER
    symbols_at = dynamic_at + 8 * _DYNAMIC_ENTRY
    hash_at = symbols_at + _SYMBOL
    strings_at = hash_at + _HASH
    entries = (
        (_DT_NEEDED, len(soname) + 2),
        (_DT_SONAME, 1),
        (_DT_HASH, hash_at),
        (_DT_STRTAB, strings_at),
        (_DT_SYMTAB, symbols_at),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMENT, _SYMBOL),
        (0, 0),
    )
    total = strings_at + len(strings)
    segments = (
        _segment(_PT_LOAD, 0, total, _PAGE),
        _segment(_PT_DYNAMIC, dynamic_at, 8 * _DYNAMIC_ENTRY, 8),
        _segment(_PT_GNU_STACK, 0, 0, 16),  # says that the stack need not be executable
    )
    no_symbols = bytes(_SYMBOL) + struct.pack("<4I", 1, 1, 0, 0)
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    return _elf_header(machine) + b"".join(segments) + dynamic + no_symbols + strings


def _elf_header(machine: int) -> bytes:
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)  # 64 bit, little-endian, version 1
    shared, version, program_headers = 3, 1, 3
    offsets = (0, _HEADER, 0, 0)  # no entry point, program headers, no sections, no flags
    sizes = (_HEADER, _PROGRAM_HEADER, program_headers, 64, 0, 0)
    return identity + struct.pack("<HHIQQQIHHHHHH", shared, machine, version, *offsets, *sizes)


def _segment(kind: int, at: int, size: int, align: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, _READ | _WRITE, at, at, at, size, size, align)
