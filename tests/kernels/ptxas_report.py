"""What ptxas reports of kernels: registers, stack, spills and shared memory."""

import importlib
import re
from typing import NamedTuple


class Usage(NamedTuple):
    """What ptxas reports of a kernel."""

    registers: int
    stack: int
    spilled: int
    shared: int


def usage_of(arch: str, text: str) -> dict[str, Usage]:
    """Compile kernels to machine code, and read the compiler's own report."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"lora.cu", 0, [], [])
    options = [b"--std=c++17", b"--ptxas-options=-v", f"--gpu-architecture={arch}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    assert int(status) == 0, log.decode()
    return dict(map(_usage, log.decode().split("Compiling entry function '")[1:]))


def _usage(report: str) -> tuple[str, Usage]:
    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    stack, shared = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
    return report.split("'")[0], Usage(number(r"Used (\d+) registers"), stack, spilled, shared)
