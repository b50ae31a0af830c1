"""`--adapter NAME=PATH` arguments: parse, load and activate; the empty name is the base model."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Executor, LoRAManager, Manifest, TensorMap, load_adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.scripts.terminal.hub import hub_path

BASE = "(base)"  # how tables call the empty name


def name_and_path(text: str, option: str = "--adapter") -> tuple[str, Path]:
    """Read `NAME=PATH`, the value of an option.

    Raises:
        ConfigError: the text is of another form, or the path is a name that the hub does not have.
    """
    name, _, path = text.partition("=")
    if not (name and path):
        raise ConfigError(f"{option} is {text!r}, expected NAME=PATH, such as json=adapters/json")
    return name, hub_path(Path(path))


def adapter_paths(arguments: Iterable[str]) -> dict[str, Path]:
    """Return the paths of every `NAME=PATH`, by name.

    Raises:
        ConfigError: as `name_and_path`, or two have one name.
    """
    paths: dict[str, Path] = {}
    for name, path in map(name_and_path, arguments):
        if name in paths:
            raise ConfigError(f"--adapter names two adapters {name!r}; give each a name of its own")
        paths[name] = path
    return paths


def add_adapter_option(add: Callable[..., object]) -> None:
    """Add `--adapter NAME=PATH` to a command."""
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="an adapter of any format, or org/name on the hub; may be repeated",
    )


def manager_of(engine: Executor, arguments: list[str]) -> LoRAManager:
    """Return a manager of an engine with every `NAME=PATH`.

    Raises:
        ConfigError: as `adapter_paths`.
        AdapterError: an adapter cannot be read, or does not fit.
    """
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for name, path in adapter_paths(arguments).items():
        manager.load_weights(name, path)
    return manager


def previewed(path: Path, manifest: Manifest) -> Coverage:
    """Return what would become of an adapter's tensors, of which no value is read.

    What is suspicious about it is logged.

    Raises:
        AdapterError: it cannot be read.
    """
    coverage = preview_adapter(load_adapter(path, manifest), manifest, strict=False)
    log_warnings(coverage.source, coverage.warnings)
    return coverage


def activate(manager: LoRAManager, name: str) -> None:
    """Switch to an adapter, or to the base model."""
    if name:
        manager.switch_weights(name)
    else:
        manager.reset_weights()


def timed_switch(manager: LoRAManager, name: str) -> float:
    """Activate an adapter ("" is the base model), point a tensor map at it; return microseconds."""
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    start = time.perf_counter()
    activate(manager, name)
    manager.refresh_tensor_map(tensor_map)
    return (time.perf_counter() - start) * 1e6
