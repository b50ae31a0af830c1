"""Weight files of a base model and their headers."""

import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors

from trt_lora.builder.checkpoint.model_directory import NEXT_STEP, check_content, read_object
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import listed, shown

if TYPE_CHECKING:  # torch takes seconds to import, and headers need none
    import torch

SAFETENSORS, GGUF = ".safetensors", ".gguf"
_FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read
_INDEX = ".index.json"  # behind the name of a file that lies in shards
_WEIGHT_SUFFIXES = (SAFETENSORS, ".bin", ".pt", ".pth", GGUF, ".h5", ".msgpack")
_GGUF_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")

_FLOATS = {"F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64"}
_FLOAT_NAMES = {"F16": "float16", "BF16": "bfloat16"}  # of those that are no float32 or wider
_SMALL_FLOATS = ("F8", "F6", "F4", "float8", "float4")
# Tensors that only quantised linears have.
_QUANTISED = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "qzeros", "SCB")


@dataclass(frozen=True)
class StoredWeight:
    """Header entry of one tensor."""

    name: str
    dtype: str  # in the file's own spelling: BF16 or bfloat16
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its values; 0 of a dtype without bits in its name."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * int(bits[0]) // 8 if bits else 0


def check_dense(headers: Mapping[Path, Iterable[StoredWeight]]) -> None:
    """Refuse files with quantised weights.

    Raises:
        ModelError: one has such.
    """
    for path, weights in headers.items():
        quantised = [weight.name for weight in weights if _is_quantised(weight)]
        if quantised:
            raise ModelError(
                f"{path} has quantised weights that nothing dequantises: {listed(quantised)}; pass "
                "the model as it was before, or save a dequantised copy"
            )


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the files with the model's weights, those that transformers reads.

    Raises:
        ModelError: there are none, some are missing, or two sets of them are there.
    """
    for name in _FILES:
        single, index = directory / name, directory / f"{name}{_INDEX}"
        shards = _shards(index) if os.path.lexists(index) else ()
        has_single = os.path.lexists(single)  # a link may lead nowhere
        if has_single and any(path.exists() for path in shards if path != single):
            raise ModelError(
                f"{directory} has two sets of weights, {single.name} and the shards of "
                f"{index.name}; remove one"
            )
        if has_single or shards:
            return (single,) if has_single else _present(shards, index)
    others = sorted(p.name for p in directory.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    raise ModelError(
        f"{directory} has no {' or '.join(_FILES)}, and no index of either"
        f"{', only ' + listed(others) if others else ''}; pass the folder that save_pretrained "
        "wrote or the model hub downloaded"
    )


def lone_gguf(directory: Path) -> Path | None:
    """Return the one GGUF file of a model that has its weights in no other form.

    Raises:
        ModelError: there are two, or parts of one.
    """
    if any(os.path.lexists(directory / f"{name}{end}") for name in _FILES for end in ("", _INDEX)):
        return None
    found = sorted(path.name for path in directory.glob(f"*{GGUF}"))
    if parts := [name for name in found if _GGUF_PART.search(name)]:
        raise ModelError(
            f"{directory} has parts of a GGUF file, {listed(parts)}; make one of them with "
            "llama-gguf-split --merge"
        )
    if len(found) > 1:
        raise ModelError(f"{directory} has {len(found)} GGUF files, {listed(found)}; keep one")
    return directory / found[0] if found else None


def read_header(path: Path) -> tuple[StoredWeight, ...]:
    """Return what a file of weights says that it holds.

    Raises:
        ModelError: it cannot be read.
    """
    check_content(path)
    read = _read_safetensors if path.suffix == SAFETENSORS else _read_pickle
    try:
        return tuple(read(path))
    except Exception as error:  # what torch.load raises depends on where the file is damaged
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{path} is damaged or no {path.suffix} file ({reason:.200}); {NEXT_STEP}"
        ) from error


def stored_dtype(weights: Iterable[StoredWeight]) -> str:
    """Return the dtype of most of the floats: float16, bfloat16, or float32 of others."""
    counts = Counter[str]()
    for weight in (weight for weight in weights if weight.dtype in _FLOATS):
        counts[_FLOAT_NAMES.get(weight.dtype, weight.dtype)] += math.prod(weight.shape)
    commonest = max(counts, key=counts.__getitem__, default="")
    return commonest if commonest in _FLOAT_NAMES.values() else "float32"


def read_weights(
    path: Path, is_wanted: Callable[[str], object] = lambda _: True
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the weights of a file whose header has been read, one at a time, by name."""
    import torch

    if path.suffix == SAFETENSORS:
        with safetensors.safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in filter(is_wanted, file.keys()))
    else:
        weights = torch.load(path, mmap=zipfile.is_zipfile(path), weights_only=True)
        yield from ((name, weights[name]) for name in filter(is_wanted, weights))


def _read_safetensors(path: Path) -> Iterator[StoredWeight]:
    with safetensors.safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            weight = file.get_slice(name)
            yield StoredWeight(name, str(weight.get_dtype()), tuple(weight.get_shape()))


def _read_pickle(path: Path) -> Iterator[StoredWeight]:
    import torch

    weights = torch.load(path, map_location="meta", weights_only=True)
    for name, weight in weights.items():
        dtype = str(weight.dtype).removeprefix("torch.")
        yield StoredWeight(name, dtype, tuple(weight.shape))


def _shards(index: Path) -> tuple[Path, ...]:
    check_content(index)
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(
            f"{index}: weight_map is {shown(names)}, expected the file of every weight; {NEXT_STEP}"
        )
    return tuple(index.parent / name for name in sorted(set(names.values())))


def _present(shards: tuple[Path, ...], index: Path) -> tuple[Path, ...]:
    if missing := [path.name for path in shards if not path.exists()]:
        raise ModelError(
            f"{index} names {len(missing)} files that are not there: {listed(missing)}; {NEXT_STEP}"
        )
    return shards


def _is_quantised(weight: StoredWeight) -> bool:
    is_weight = weight.name.endswith(".weight")
    return (
        weight.dtype.startswith(_SMALL_FLOATS)
        or weight.name.endswith(_QUANTISED)
        or (is_weight and weight.dtype not in _FLOATS)
    )
