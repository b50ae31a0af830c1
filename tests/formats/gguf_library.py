"""The gguf package: a model in one file, rows of q and k put back as they were trained."""

from functools import partial
from pathlib import Path

from formats.checks import Weights, check_fixtures, check_made
from support.models.gguf_files import Type, all_of, in_gguf, library_weights


def read(directory: Path) -> Weights:
    """Return the weights of linears, a tied head among them."""
    found = library_weights(directory)
    head = found.get("lm_head.weight", found["model.embed_tokens.weight"])
    layers = {n.removesuffix(".weight"): w for n, w in found.items() if n.endswith("_proj.weight")}
    return layers | {"lm_head": head}


def make(kind: Type, floats: Path, codes: Path) -> None:
    """Write a checkpoint whose matrices are of one type."""
    in_gguf(floats, codes, all_of(kind))


if __name__ == "__main__":
    check_fixtures("gguf", read)
    for kind in (Type.Q4_0, Type.Q8_0):
        check_made(kind.name, partial(make, kind), read)
