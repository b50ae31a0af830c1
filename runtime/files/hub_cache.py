"""Model names from Hugging Face hub cache paths: models--org--name/snapshots/revision."""

from pathlib import PurePath

_PREFIX = "models--"


def model_name(path: PurePath) -> str:
    """Return what a model is called: org/name in the hub's cache, elsewhere its folder's name."""
    for place in (path, *path.parents):
        cached = place.parent.parent.name
        if place.parent.name == "snapshots" and cached.startswith(_PREFIX):
            return cached.removeprefix(_PREFIX).replace("--", "/")
    return path.name
