"""Models and adapters by their name on the Hugging Face hub, where no such path is."""

import os
import re
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra

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
