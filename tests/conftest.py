"""The real model and its engine, a tiny engine or one that is given, and TensorRT's headers.

What builds them is imported by the fixture that builds: many tests run where there is no torch.
"""

import contextlib
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from support.build_cache import build_cache
from support.doc_blocks import ROOT, Block, build_blocks, run_block
from support.processes import first_on_path

# A process takes whole files: those that take minutes go first, so that none is left at the end.
LONGEST = (
    *("scripts/comparison/test_bisect", "end_to_end/test_architectures", "docs"),
    *("scripts/comparison", "end_to_end", "builder"),
)

# The mark of a file that needs torch, PEFT, the builder or benchmarks, and what leaves it out.
NEEDS_TORCH, LEAN = "pytest.mark.needs_torch", "not needs_torch"

# Where distributions and CUDA's installer put headers.
INCLUDES = (
    *("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/include"),
    *("/usr/local/tensorrt/include", "/usr/local/cuda/include"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take folders of headers, which no package of Python has, and what cannot be built here."""
    parser.addoption(
        "--tensorrt-include",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of NvInfer.h, and another one of cuda_runtime_api.h where it is elsewhere",
    )
    told = "a folder by support.models.tiny_engine_folder; without it, the engine is built"
    parser.addoption("--tiny-engine", type=Path, metavar="FOLDER", help=told)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that `-m "not needs_torch"` leaves out: there may be no torch to import."""
    if LEAN not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return NEEDS_TORCH in collection_path.read_text(encoding="utf-8") or None


@pytest.fixture(autouse=True)
def _log_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that runs in this process leaves the log as pytest needs it."""
    from trt_lora.runtime.server.log_lines import LogConfig

    monkeypatch.setattr(LogConfig, "set_up", lambda _: None)


@pytest.fixture(scope="session")
def tensorrt_includes(request: pytest.FixtureRequest) -> list[Path]:
    """Folders of the headers of TensorRT or TensorRT-RTX and CUDA; skips where there are none."""
    given = request.config.getoption("--tensorrt-include")
    folders = [Path(folder) for folder in given or INCLUDES]
    for header in ("NvInfer.h", "cuda_runtime_api.h"):
        if not any((folder / header).is_file() for folder in folders):
            searched = ", ".join(map(str, folders))
            pytest.skip(f"no {header} in {searched}; give its folder as --tensorrt-include DIR")
    return [folder for folder in folders if folder.is_dir() and str(folder) != "/usr/include"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; within a file the order stays."""
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what is imported by now, 400,000 objects that stay."""
    gc.collect()
    gc.freeze()


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(ROOT / "tests").as_posix()
    return next((i for i, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a transformers directory."""
    from trt_lora.scripts.demo.model import DEFAULT_DIRECTORY, ensure_demo_model

    with _shared("demo_model"):
        return ensure_demo_model(ROOT / DEFAULT_DIRECTORY)


@pytest.fixture(scope="session")
def terrain_model() -> Path:
    """The terrain model's ONNX file."""
    from trt_lora.scripts.demo.terrain.model import DEFAULT_DIRECTORY, ensure_terrain_model

    with _shared("terrain_model"):
        return ensure_terrain_model(ROOT / DEFAULT_DIRECTORY)


@pytest.fixture(scope="session")
def readme_folder(demo_model: Path) -> Path:
    """A folder that looks like a checkout after `make demo`, where the README's commands run.

    It holds the engines that the commands of the README and of a page build, and is kept as long as
    the sources that build them do not change.
    """
    folder = build_cache("readme", "".join(block.text for block in build_blocks().values()))
    for name in ("build/smollm2", "scripts", "tests/adapters"):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(ROOT / name)
    with _shared("readme_engines"):
        missing = [name for name in build_blocks() if not (folder / "engines" / name).exists()]
        if missing:
            program = f"from support.readme_engines import build_engines; build_engines(*{missing})"
            run_block(Block("python", program), folder, first_on_path(ROOT / "tests"))
    return folder


@pytest.fixture(scope="session")
def real_engine(readme_folder: Path) -> Path:
    """The engine of the real model: seven linears of 30 layers, float32."""
    return readme_folder / "engines" / "smollm2"


@pytest.fixture(scope="session")
def demo_adapters() -> dict[str, Path]:
    """The trained adapters by name."""
    return {path.name: path for path in sorted((ROOT / "tests" / "adapters").iterdir())}


@dataclass(frozen=True)
class TinyEngine:
    """A random Llama of two layers, its engines without a plan, and one adapter of rank 4."""

    model: Path
    engine: Path
    adapter: Path
    slots: Path  # the engine for two adapters and four rows at a time


@pytest.fixture(scope="session")
def tiny_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TinyEngine:
    """Engines that take seconds to build: LoRA on q_proj and v_proj, rank 1 to 16."""
    folder: Path | None = request.config.getoption("--tiny-engine")
    if folder is None:
        from support.models.tiny_engine_folder import build_tiny_engine

        build_tiny_engine(folder := tmp_path_factory.mktemp("tiny"))
    folder = folder.resolve()  # some tests link to its files
    return TinyEngine(folder / "model", folder / "engine", folder / "a", folder / "slots")


def _shared(name: str) -> FileLock:
    """A lock between the processes that run the tests: the first of them makes what all use."""
    (ROOT / "build").mkdir(exist_ok=True)
    return FileLock(ROOT / "build" / f"{name}.lock")
