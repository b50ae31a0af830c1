"""Engines and adapters under a folder, by their headers; no weight is read."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import ConfigError, LoRAError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter, looks_like_adapter
from trt_lora.runtime.manifest import BACKEND_FILES, MANIFEST_FILE, Manifest, load_manifest


@dataclass(frozen=True)
class FoundEngine:
    """An engine directory."""

    path: str
    base_model: str
    dtype: str
    flavour: str  # "none" where it has no plan
    max_lora_rank: int
    max_loras: int  # of a batch, each row with its own; 0: one for all rows
    max_batch_size: int
    max_seq_len: int
    size_bytes: int


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter of any format."""

    path: str
    base_model: str  # the name that its config gives; empty where it gives none
    ranks: tuple[int, ...]  # each once, in order
    sites: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Unreadable:
    """What looks like an engine or an adapter, and is refused."""

    path: str
    reason: str


Found = FoundEngine | FoundAdapter | Unreadable


class FolderSearch:
    """What a folder is, or what lies in it, the nearest first.

    Hidden folders are not looked into, nor engines, adapters, other file systems, and links to
    folders that are neither. A `.safetensors` file is an adapter if it can be read and has LoRA
    tensors.
    """

    def __init__(self, folder: Path, most: int, watch: Callable[[int, Path], object]) -> None:
        """Look for nothing yet.

        Args:
            folder: where to begin.
            most: folders to look into.
            watch: called before each, with how many there were and which one comes.

        Raises:
            ConfigError: there is no such folder, or no number of them.
        """
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give one that engines or adapters lie in")
        if most < 1:
            raise ConfigError(f"--folders is {most}, expected 1 or more")
        self.elsewhere: list[Path] = []  # on other file systems
        self._most, self._watch = most, watch
        self._waiting, self._device = deque([folder]), device_of(folder)

    @property
    def next(self) -> Path | None:
        """The folder that was not looked into; None where all were."""
        return self._waiting[0] if self._waiting else None

    def __iter__(self) -> Iterator[Found]:
        """Yield each as it is found; what could not be read is among them."""
        if found := _what_it_is(self._waiting[0]):
            yield found
            self._waiting.clear()
        for count in range(self._most):
            if self._waiting:
                self._watch(count, self._waiting[0])
                yield from self._in(self._waiting[0])
                self._waiting.popleft()

    def _in(self, folder: Path) -> Iterator[Found]:
        try:
            for path in sorted(folder.iterdir()):
                if path.name.startswith("."):
                    continue
                if found := _what_it_is(path):
                    yield found
                elif path.is_dir() and not path.is_symlink():
                    here = device_of(path) == self._device
                    (self._waiting if here else self.elsewhere).append(path)
        except OSError as error:
            yield Unreadable(str(folder), f"cannot be read: {error.strerror}")


def device_of(path: Path) -> int:
    """Return the number of the file system that a path is on."""
    return path.lstat().st_dev


def _what_it_is(path: Path) -> Found | None:
    files = (name for names in BACKEND_FILES.values() for name in names)
    try:
        if (path / MANIFEST_FILE).is_file() and any((path / name).exists() for name in files):
            return _engine(path, load_manifest(path))
        if looks_like_adapter(path):
            return _adapter(path, load_adapter(path))
    except LoRAError as error:
        is_one = path.suffix != ".safetensors" or path.is_dir()
        return Unreadable(str(path), str(error)) if is_one else None
    return None


def _engine(path: Path, manifest: Manifest) -> FoundEngine:
    return FoundEngine(
        str(path),
        manifest.base_model.name,
        manifest.dtype,
        manifest.flavour,
        manifest.max_lora_rank,
        manifest.max_loras,
        manifest.max_batch_size,
        manifest.max_seq_len,
        sum(record.size_bytes for record in manifest.files.values()),
    )


def _adapter(path: Path, adapter: Adapter) -> FoundAdapter | None:
    if not adapter.ranks and path.suffix == ".safetensors":
        return None  # weights of something else
    return FoundAdapter(
        str(path),
        adapter.base_model or "",
        tuple(sorted(set(adapter.ranks.values()))),
        len(adapter.ranks),
        tuple(sorted({weight.dtype for weight in adapter.weights.values()})),
    )
