"""`--adapter NAME=PATH` and `--use NAME`: parse, load and activate; no name is the base model."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime import AdapterStore, LoRAManager, Manifest, TensorMap, load_adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.scripts.terminal.console import note

BASE = "(base)"  # how tables call the empty name
BASE_NAME = "base"  # how a person asks for the base model, where no adapter has this name


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


def add_use_option(add: Callable[..., object]) -> None:
    """Add `--use NAME` to a command."""
    add(
        "--use",
        metavar="NAME",
        help=f"the adapter that answers, or {BASE_NAME}: no adapter (default: the one that "
        "--adapter gives; of several, none)",
    )


def adapter_in_use(use: str | None, names: Sequence[str]) -> str:
    """Return which adapter is to answer, for `adapter_or_base`; say so where it is a surprise.

    Args:
        use: the value of `--use`, None where it is not there.
        names: of the adapters that are given.

    Raises:
        ConfigError: one is named, and none is given.
    """
    if use is None and len(names) > 1:
        note(f"the base model answers; choose an adapter with --use: {', '.join(names)}")
    if use is None:
        return names[0] if len(names) == 1 else ""
    if not names and use not in ("", BASE_NAME):
        raise ConfigError(f"--use is {use!r}, and no adapter is given; add --adapter {use}=PATH")
    return use


def load_adapters(adapters: AdapterStore, paths: Mapping[str, Path]) -> None:
    """Load adapters by their names.

    Raises:
        AdapterError: an adapter cannot be read, or does not fit.
    """
    for name, path in paths.items():
        adapters.load(name, path)


def previewed(path: Path, manifest: Manifest) -> Coverage:
    """Return what would become of an adapter's tensors, of which no value is read.

    What is suspicious about it is logged.

    Raises:
        AdapterError: it cannot be read.
    """
    coverage = preview_adapter(load_adapter(path, manifest), manifest, strict=False)
    log_warnings(coverage.source, coverage.warnings)
    return coverage


def adapter_or_base(adapters: AdapterStore, name: str) -> str | None:
    """Return the name of an adapter; None, for no name or `BASE_NAME`, is the base model.

    Raises:
        UnknownAdapterError: there is no adapter of that name.
    """
    if name in ("", BASE_NAME) and name not in adapters.names:
        return None
    return adapters.info(name).name


def timed_switch(manager: LoRAManager, name: str | None) -> float:
    """Activate an adapter, or none, and point a tensor map at it; return microseconds."""
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    start = time.perf_counter()
    manager.reset_weights() if name is None else manager.switch_weights(name)
    manager.refresh_tensor_map(tensor_map)
    return (time.perf_counter() - start) * 1e6


# org/name, and perhaps @ a branch, tag or commit
_NAME = re.compile(r"(?P<repo>\w[\w.-]{0,47}/\w[\w.-]{0,95}?)(@(?P<revision>[\w./-]+))?")
# Never weights that only a pickle reader takes.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def hub_path(path: Path, revision: str | None = None) -> Path:
    """Return a path as it is, or where the hub's files of that name are; downloads what is missing.

    The hub's own settings hold (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`).

    Args:
        path: of a file or directory; or org/name, org/name@revision.
        revision: branch, tag or commit of a name without one; the main branch by default.

    Raises:
        ConfigError: there is neither, or the hub cannot be reached.
    """
    found = _NAME.fullmatch(path.as_posix())
    if found is None or os.path.lexists(path) or os.path.lexists(path.parent):
        return path
    return _snapshot(found["repo"], found["revision"] or revision)


def _snapshot(repo: str, revision: str | None) -> Path:
    with extra("text", "downloading from the Hugging Face hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:  # not found, private, offline
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        at = f" at {revision}" if revision else ""
        raise ConfigError(
            f"{repo} is no directory here, and cannot be had from Hugging Face's hub{at}: {reason}"
        ) from error
