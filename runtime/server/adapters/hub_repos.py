"""HubRepos: adapters in repositories of the Hugging Face hub that are allowed by name."""

import asyncio
import glob
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from trt_lora.plugins.errors import BackendError, ConfigError

try:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars
except ImportError as error:
    raise BackendError(f"{error}; pip install 'trt-lora[hub]'") from error

_CONFIG = "adapter_config.json"
_HOLDS_S, _FAILURE_HOLDS_S = 60.0, 5.0  # what the hub has said of a repository
_AT_A_TIME = 2  # downloads


class HubRepos:
    """The name of an adapter is org/repo, or org/repo/folder; the hub's cache keeps the files.

    A repository is asked once in a minute, however many unknown names begin with its own, for each
    `adapter_config.json`. Weights come when a name is used for the first time, and never those that
    only a pickle reader takes. The hub's own settings hold (HF_HOME, HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE). One that is loaded stays what it is: a new commit is for those after it.
    """

    def __init__(self, repos: Sequence[str]) -> None:
        """Take the repositories: org/repo.

        Raises:
            ConfigError: one is no such name.
        """
        for repo in repos:
            if repo.count("/") != 1 or not all(repo.split("/")):
                raise ConfigError(f"--lora-hub-repos has {repo!r}, expected ORG/REPO")
        disable_progress_bars()  # among the lines of a log
        self._repos = tuple(repos)
        # What the hub has said of each, and until when that holds.
        self._answers: Mapping[str, tuple[float, Path | BackendError]] = {}
        self._threads = ThreadPoolExecutor(_AT_A_TIME, "trt-lora-hub")

    async def resolve(self, base: str, name: str) -> Path | None:
        """See `Resolver`."""
        del base
        # A place has one name: "a/." and "a//" would be as many adapters as somebody likes.
        if str(PurePosixPath(name)) != name or ".." in name:
            return None
        for repo in self._repos:
            if name == repo or name.startswith(f"{repo}/"):
                loop = asyncio.get_running_loop()
                folder = name[len(repo) + 1 :]
                return await loop.run_in_executor(self._threads, self._fetched, repo, folder)
        return None

    async def close(self) -> None:
        """See `Resolver`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetched(self, repo: str, folder: str) -> Path | None:
        snapshot = self._snapshot(repo)
        place = (snapshot / folder).resolve()
        if not place.is_relative_to(snapshot) or not (place / _CONFIG).is_file():
            return None
        inside = f"{glob.escape(folder)}/" if folder else ""
        wanted = [f"{inside}adapter_*{ending}" for ending in (".json", ".safetensors")]
        _download(repo, wanted, snapshot.name)
        return place

    def _snapshot(self, repo: str) -> Path:
        """Where the cache has a repository, with every `adapter_config.json` of its main branch."""
        end, found = self._answers.get(repo, (-math.inf, Path()))
        if time.monotonic() > end:
            try:
                found, holds_s = _download(repo, [f"*{_CONFIG}"], None), _HOLDS_S
            except BackendError as error:
                found, holds_s = error, _FAILURE_HOLDS_S
            self._answers = {**self._answers, repo: (time.monotonic() + holds_s, found)}
        if isinstance(found, BackendError):
            raise BackendError(str(found))
        return found


def _download(repo: str, patterns: Sequence[str], revision: str | None) -> Path:
    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # those of the hub, and of the HTTP library that it happens to use
        text = f"{repo} cannot be had from Hugging Face's hub: {type(error).__name__}"
        raise BackendError(f"{text}; try again") from error
    return Path(found).resolve()
