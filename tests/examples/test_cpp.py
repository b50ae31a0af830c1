"""The C++ header reads engines and adapters as Python does, and the C++ program compiles."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.doc_blocks import ROOT
from support.fakes.tiny_engine import UP, engine_directory, small_manifest

from trt_lora.runtime import load_adapter, save_adapter
from trt_lora.runtime.manifest import MANIFEST_FILE, Manifest
from trt_lora.runtime.memory.dtypes import Array

EXAMPLES, HERE = ROOT / "examples" / "cpp", Path(__file__).parent
STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror")
PROGRAM, SOURCE_LINES = "bind_adapter.cpp", 80

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="it needs g++")

Print = Callable[[Path, Path], str]


def compile_cpp(*arguments: str | Path) -> None:
    """Run g++ with every warning an error."""
    command = ["g++", *STRICT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Print:
    """What `print_fitted.cpp` prints of an engine's directory and an adapter's file."""
    program = tmp_path_factory.mktemp("cpp") / "print_fitted"
    compile_cpp("-I", EXAMPLES, HERE / "print_fitted.cpp", "-o", program)

    def run(engine: Path, adapter: Path) -> str:
        command = [str(program), str(engine), str(adapter)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return run


def factors(rank: int) -> dict[str, Array]:
    """A and B of one site; the other takes a dummy."""
    rng = np.random.default_rng(rank)
    return {
        f"{UP.path}.lora_A.weight": rng.normal(size=(UP.k, rank)).astype(np.float32),
        f"{UP.path}.lora_B.weight": rng.normal(size=(rank, UP.n)).astype(np.float32),
    }


def converted(folder: Path, manifest: Manifest, weights: dict[str, Array]) -> Path:
    """What `trt-lora convert-adapter --format edgellm --engine DIR` makes of these weights."""
    save_file(weights, folder / "named.safetensors")
    adapter = load_adapter(folder / "named.safetensors")
    save_adapter(adapter, folder / "out", "edgellm", dtype="float32", manifest=manifest)
    return folder / "out" / "processed_adapter_model.safetensors"


def padded(a: Array, rows: int, columns: int) -> Array:
    return np.pad(a, [(0, rows - a.shape[0]), (0, columns - a.shape[1])])


@pytest.mark.parametrize(
    ("plugin", "rank", "expected_rank"), [("native", 3, 3), ("aot", 3, 8), ("aot", 9, 12)]
)
def test_the_header_gives_the_bytes_that_are_bound(
    plugin: str, rank: int, expected_rank: int, printed: Print, tmp_path: Path
) -> None:
    manifest = replace(small_manifest(), lora_plugin=plugin, max_lora_rank=12)
    engine = engine_directory(tmp_path / "engine", manifest)
    weights = factors(rank)
    a, b = weights.values()
    a, b = padded(a, UP.k, expected_rank), padded(b, expected_rank, UP.n)
    words = printed(engine, converted(tmp_path, manifest, weights)).split()
    assert words == [
        UP.path,
        *(str(UP.k), str(expected_rank), a.tobytes().hex()),
        *(str(expected_rank), str(UP.n), b.tobytes().hex()),
    ]


def test_both_spellings_of_a_name_are_read(printed: Print, tmp_path: Path) -> None:
    a, b = factors(2).values()
    save_file({f"lora_A_{UP.path}": a, f"lora_B_{UP.path}": b}, tmp_path / "a.safetensors")
    found = printed(engine_directory(tmp_path / "engine"), tmp_path / "a.safetensors")
    assert found.split()[3] == a.tobytes().hex()


def test_what_does_not_fit_is_refused_by_name(printed: Print, tmp_path: Path) -> None:
    engine = engine_directory(tmp_path / "engine")
    a, b = factors(2).items()
    unknown = {a[0]: a[1], b[0]: b[1], "model.layers.9.up.lora_A.weight": a[1]}
    cases: list[tuple[dict[str, Array], str]] = [
        (unknown, "model.layers.9.up.lora_A.weight has no site"),
        (dict([a]), f"{UP.path} has one factor of two"),
        ({a[0]: a[1].T.copy(), b[0]: b[1].T.copy()}, "expected A [k, r] and B [r, n] with k=4"),
        ({a[0]: a[1].astype(np.float16), b[0]: b[1]}, f"{UP.path}: expected float32"),
        (factors(5), f"{UP.path}: rank 5, expected 1 to 4"),
        ({a[0]: a[1][:, 0]}, f"{a[0]} is no matrix of floats"),
        ({a[0]: a[1].astype(np.int32)}, f"{a[0]} is no matrix of floats"),
    ]
    for number, (weights, message) in enumerate(cases):
        file = tmp_path / f"{number}.safetensors"
        save_file(weights, file)
        assert message in printed(engine, file)


def test_an_adapter_of_another_base_model_is_refused(printed: Print, tmp_path: Path) -> None:
    manifest = small_manifest()
    other = replace(manifest, base_model=replace(manifest.base_model, fingerprint="1" * 64))
    file = converted(tmp_path, other, factors(2))
    found = printed(engine_directory(tmp_path / "engine", manifest), file)
    assert found == "refused: the adapter was converted for another base model"


def test_a_damaged_file_is_refused(printed: Print, tmp_path: Path) -> None:
    engine, file = engine_directory(tmp_path / "engine"), tmp_path / "a.safetensors"
    save_file(factors(2), file)
    whole = file.read_bytes()
    header = len(whole) - sum(w.nbytes for w in factors(2).values())
    damaged: dict[str, bytes] = {
        "is no safetensors file": whole[:4],
        "JSON: expected": whole[:8] + b"[" + whole[9:],
        "shape, dtype and bytes do not agree": whole[:-1],
        'there is no "': whole[:header].replace(b"data_offsets", b"date_offsets") + whole[header:],
        '"x" is no whole number': whole.replace(b'"shape":[4,2]', b'"shape":[4,x]'),
        "JSON: expected less nesting": (500).to_bytes(8, "little") + b"[" * 500,
    }
    for message, content in damaged.items():
        file.write_bytes(content)
        found = printed(engine, file)
        assert found.startswith("refused: ")
        assert message in found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_loras": 2}, "the engine has slots, whose inputs are stacks"),
        ({"schema_version": 3}, "another schema_version"),
    ],
)
def test_an_engine_that_the_header_does_not_know_is_refused(
    changed: dict[str, Any], message: str, printed: Print, tmp_path: Path
) -> None:
    engine, file = engine_directory(tmp_path / "engine"), tmp_path / "a.safetensors"
    save_file(factors(2), file)
    fields = json.loads((engine / MANIFEST_FILE).read_text())
    (engine / MANIFEST_FILE).write_text(json.dumps(fields | changed))
    assert message in printed(engine, file)


def test_the_program_compiles_against_tensorrt(tensorrt_includes: list[Path]) -> None:
    folders = (word for folder in tensorrt_includes for word in ("-isystem", folder))
    compile_cpp("-fsyntax-only", *folders, EXAMPLES / PROGRAM)


def test_the_program_is_short_and_names_the_profile_that_the_manifest_has_first() -> None:
    text = (EXAMPLES / PROGRAM).read_text()
    code = [line for line in text.splitlines() if line.strip() and line.strip()[:2] != "//"]
    assert len(code) <= SOURCE_LINES
    assert "Profile 0 is `decode`" in text
    assert next(iter(small_manifest().profiles)) == "decode"
