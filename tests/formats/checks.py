"""Hold fixtures, and our reader, against what a quantisation library makes of codes."""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from support.models.quantised import FOLDER, GGUFS, NAMES, expected_hashes, library_of, sha256
from support.models.tiny_models import save_model

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.stored_linears import dense, stored_linears

Weights = Mapping[str, torch.Tensor]  # [n, k] in float32, by the path of a linear
Tensors = Mapping[str, torch.Tensor]  # of one linear in a file, by the end of its name
Read = Callable[[Path], Weights]
Make = Callable[[Path, Path], None]  # of a dense checkpoint, one in codes

# Not the sizes of the fixtures, and a k that is no power of two.
_SIZES = {"hidden_size": 128, "intermediate_size": 384}


def tensors_of_linears(directory: Path) -> Mapping[str, Tensors]:
    """Return what a checkpoint stores of each linear, by its path."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        path, is_linear, end = name.partition("_proj.")
        if is_linear:
            found.setdefault(f"{path}_proj", {})[end] = tensor
    return found


def check_fixtures(package: str, read: Read) -> None:
    """Read every fixture that a library made, and compare with the hashes beside it.

    Raises:
        AssertionError: a weight is not that of its hash, or no fixture is of this version.
    """
    library = f"{package} {version(package)}"
    names = [name for name in (*NAMES, *GGUFS) if library_of(name) == library]
    assert names, f"{library} made no fixture. Pin the version that expected.json names"
    for name in names:
        found = {path: sha256(weight.numpy()) for path, weight in read(FOLDER / name).items()}
        expected = expected_hashes(name)
        paths = found.keys() | expected.keys()
        wrong = sorted(path for path in paths if found.get(path) != expected.get(path))
        assert not wrong, f"{library} reads other weights in {name} than expected.json has: {wrong}"
        print(f"{library} reads {name}: {len(found)} weights have the hashes of expected.json")


def check_made(name: str, make: Make, read: Read, *, most_ulps: int = 0) -> None:
    """Make a checkpoint by a library; ours must read the weights that it reads.

    Raises:
        AssertionError: a weight is further from the library's than so many steps of float32.
    """
    with TemporaryDirectory() as folder:
        floats, codes = Path(folder, "dense"), Path(folder, "codes")
        make(save_model("Llama", floats, **_SIZES), codes)
        found, expected = _ours(codes), read(codes)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert found, f"{name}: the library made no linear in codes"
    steps = {path: _ulps(weight, expected[path]) for path, weight in found.items()}
    wrong = {path: most for path, most in steps.items() if most > most_ulps}
    assert not wrong, f"{name}: our weights are so many steps of float32 off the library's: {wrong}"
    most = max(steps.values())
    print(f"{name}, made now: our {len(found)} weights are the library's, {most} ulp at most")


def _ours(directory: Path) -> Weights:
    stored = stored_linears(Checkpoint(directory))
    assert stored is not None, f"{directory} states no codes"
    return {path: dense(weight) for path, weight in stored.weights()}


def _ulps(ours: torch.Tensor, library: torch.Tensor) -> int:
    """Most steps between two numbers of one sign; 0: the same bits."""
    bits = [weight.float().contiguous().view(torch.int32).long() for weight in (ours, library)]
    return int((bits[0] - bits[1]).abs().max())
