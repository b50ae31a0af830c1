"""Compiling the kernels without a GPU, and keeping them on disk."""

import ctypes
import importlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernels.emulator import BUILD
from kernels.ptxas_report import usage_of

from trt_lora.plugins import cuda_bindings as cuda_library
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels import nvrtc as compile_kernels
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.launcher import KernelGroup
from trt_lora.plugins.kernels.nvrtc import (
    KERNELS,
    SLOT_KERNELS,
    architecture_of,
    compile_lora,
    compile_source,
    entry_point,
    source,
)

SMALL = ("expand_float32_1",)  # one that compiles quickly

# What each kernel may use: registers of a thread. 65536 of them are on a multiprocessor: up to 128
# for each of 256 threads two CTAs share it, up to 255 it has one.
REGISTERS = {
    "decode_bfloat16_8": 96,
    "decode_float16_8": 96,
    "decode_bfloat16_16": 128,
    "decode_float16_16": 128,
    "decode_bfloat16_32": 128,
    "decode_float16_32": 128,
    "fused_bfloat16_1": 208,
    "fused_bfloat16_4": 224,
    "fused_bfloat16_8": 224,
    "fused_float32_8": 168,
    "shrink_bfloat16_1": 208,
    "shrink_bfloat16_8": 224,
    "expand_bfloat16_1": 128,
    "expand_bfloat16_8": 208,
    "fused_tiles_bfloat16": 96,
    "shrink_tiles_bfloat16": 96,
    "expand_tiles_bfloat16": 128,
}
# Of those for rows with adapters of their own: some more, for the pass.
SLOT_REGISTERS = {
    "slots_decode_bfloat16_8": 128,
    "slots_decode_float16_8": 128,
    "slots_decode_bfloat16_16": 128,
    "slots_decode_float16_16": 128,
    "slots_fused_bfloat16_8": 255,
    "slots_fused_float32_8": 208,
    "slots_shrink_bfloat16_8": 240,
    "slots_expand_bfloat16_8": 208,
    "slots_fused_tiles_bfloat16": 128,
    "slots_shrink_tiles_bfloat16": 128,
    "slots_expand_tiles_bfloat16": 128,
}
# Those of sm_89 have as many as of sm_80, those of sm_120 no more than of sm_100.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [REGISTERS, SLOT_REGISTERS], ids=["one", "slots"])
def test_no_kernel_spills_or_takes_more_registers_than_it_may(allowed: dict[str, int]) -> None:
    text = source(has_slots=allowed is SLOT_REGISTERS) + "".join(map(entry_point, allowed))
    with ThreadPoolExecutor(2) as pool:  # the compiler lets go of Python's lock
        usages = pool.map(partial(usage_of, text=text), ARCHITECTURES)
        reports = dict(zip(ARCHITECTURES, usages, strict=True))
    for arch, report in reports.items():
        assert report.keys() == set(allowed)
        for kernel, usage in report.items():
            assert usage[1:] == (0, 0, 0), (arch, kernel, usage)
            assert usage.registers <= allowed[kernel], (arch, kernel, usage)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for compiled kernels that outlasts the tests, and is not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("arch", "clusters"), [("compute_80", False), ("compute_90", True)])
@pytest.mark.parametrize("every", [KERNELS, SLOT_KERNELS], ids=["one", "slots"])
def test_every_kernel_is_in_the_ptx_with_its_argument_and_cluster(
    every: dict[str, str], arch: str, clusters: bool
) -> None:
    """Those of one dtype for older GPUs: nothing but clusters is theirs or newer ones' alone."""
    kernels = [name for name in every if clusters or "_float16" in name]
    ptx = compile_lora(arch, kernels).decode()
    entries = re.findall(r"\.entry (\w+)\(\s*\.param \.align 8 \.b8 \w+\[(\d+)\]\s*\)([^{]*){", ptx)
    assert {name for name, _, _ in entries} == set(kernels)
    for name, nbytes, directives in entries:
        assert int(nbytes) == ctypes.sizeof(KernelGroup)
        in_clusters = re.search(r"\.reqnctapercluster 8, 1, 1|\.explicitcluster", directives)
        assert bool(in_clusters) == (clusters and "expand" not in name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trt-lora" / "ptx"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the compiler was given."""
    texts: list[str] = []

    def fake(text: str, options: object) -> bytes:
        texts.append(text)
        return b"ptx %d" % len(texts)

    monkeypatch.setattr(compile_kernels, "compile_source", fake)
    return texts


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90"),
        ((12, 0), "sm_120"),
        ((8, 99), "compute_80"),
        ((99, 0), "compute_90"),
    ],
)
def test_kernels_are_machine_code_where_nvrtc_knows_the_gpu_and_else_ptx(
    capability: tuple[int, int], arch: str
) -> None:
    assert architecture_of(Chip(capability, 72)) == arch


@pytest.mark.usefixtures("cache")
def test_a_kernel_is_compiled_once(compiled: list[str]) -> None:
    assert [compile_lora("compute_80", SMALL) for _ in range(3)] == [b"ptx 1"] * 3
    assert len(compiled) == 1


@pytest.mark.usefixtures("cache")
def test_another_architecture_kernel_text_or_compiler_is_another_entry(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_lora("compute_80", SMALL)
    compile_lora("compute_90", SMALL)
    compile_lora("compute_90", ("expand_float32_4",))
    monkeypatch.setattr(compile_kernels, "source", lambda **_: "changed")
    compile_lora("compute_90", SMALL)
    monkeypatch.setattr(compile_kernels, "_nvrtc", lambda _: (13, 99))
    compile_lora("compute_90", SMALL)
    assert len(compiled) == 5


@pytest.mark.parametrize("damage", [b"", b"x" * 10, b"x" * 100])
def test_a_damaged_entry_is_compiled_again(cache: Path, compiled: list[str], damage: bytes) -> None:
    compile_lora("compute_80", SMALL)
    (entry,) = cache.iterdir()
    entry.write_bytes(damage)
    assert [compile_lora("compute_80", SMALL) for _ in range(2)] == [b"ptx 2"] * 2
    assert list(cache.iterdir()) == [entry]


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path, compiled: list[str]) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    assert [compile_lora("compute_80", SMALL) for _ in range(2)] == [b"ptx 1", b"ptx 2"]


def test_without_a_cache_variable_the_home_folder_is_used(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    compile_lora("compute_80", SMALL)
    assert len(compiled) == len(list((tmp_path / ".cache" / "trt-lora" / "ptx").iterdir())) == 1


def test_the_kernels_come_whole_from_many_threads(cache: Path, compiled: list[str]) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(compile_lora("compute_80", SMALL)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(list(cache.iterdir())) == 1


def test_a_text_that_does_not_compile_is_shown_with_the_compilers_log() -> None:
    with pytest.raises(BackendError, match=r"(?s)NVRTC_ERROR_COMPILATION.*identifier .* undefined"):
        compile_source("int a = b;", ("--gpu-architecture=compute_80",))


class WritingNvrtc:
    """An NVRTC that writes as C does: to the address it is given, whoever else reads there."""

    def __init__(self, output: bytes) -> None:
        self.output = output

    def nvrtcGetProgramLogSize(self, program: object) -> tuple[int, int]:  # noqa: N802
        return 0, len(self.output)

    def nvrtcGetProgramLog(self, program: object, log: bytes | bytearray) -> tuple[int]:  # noqa: N802
        whole = ctypes.c_char * len(log)
        if isinstance(log, bytearray):
            address = ctypes.addressof(whole.from_buffer(log))
        else:
            address = ctypes.cast(ctypes.c_char_p(log), ctypes.c_void_p).value or 0
        ctypes.memmove(address, self.output, len(self.output))
        return (0,)


@pytest.mark.parametrize("output", [b"\0", b"x", b"", b"some text"])
def test_what_the_compiler_writes_is_returned_and_changes_no_object_of_python(
    output: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_library, "bindings", lambda _: WritingNvrtc(output))
    shared = [bytes([value]) for value in range(256)]  # of each byte Python has one object
    try:
        assert compile_kernels._output("ProgramLog", None) == output
        assert [text[0] for text in shared] == list(range(256))
    finally:
        for value, text in enumerate(shared):  # or every later test would read what is wrong
            ctypes.memset(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), value, 1)


def test_missing_bindings_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return present(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=r"cuda\.bindings\.nvrtc.*pip install 'trt-lora\[rtx\]'"):
        compile_lora("compute_80", SMALL)


def test_a_missing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(cuda_library, "bindings", lambda _: SimpleNamespace(nvrtcVersion=absent))
    with pytest.raises(BackendError, match=r"libnvrtc.*; pip install 'trt-lora\[rtx\]'"):
        compile_lora("compute_80", SMALL)
