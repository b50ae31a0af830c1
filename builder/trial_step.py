"""Trial step of an engine's ONNX files on ONNX Runtime, the last stage of a build.

ONNX Runtime refuses some graphs only when it opens or runs them, which is to be the build's failure
and not the first user's.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from trt_lora.builder.progress import Progress
from trt_lora.plugins.errors import LoRAError, ModelError
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.engines.onnxruntime.engine import OnnxRuntimeEngine
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sources import Source
from trt_lora.runtime.manifest import (
    ENCODER_FILES,
    ONNX_CPU_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    EncoderPart,
    Manifest,
)
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.host import free_host_memory

_FLOAT32_BYTES = 4  # ONNX Runtime holds float16 weights so: its products on the CPU are of float32


def try_graph(work: Path, output: Path, manifest: Manifest, progress: Progress) -> None:
    """Open the ONNX file of a graph, and run it on zeros where every size is known.

    Args:
        work: the finished directory.
        output: where it will be, for messages.
        manifest: of the engine.
        progress: takes a note where it cannot be tried.

    Raises:
        ModelError: the file cannot be opened or run.
    """
    if obstacle := _obstacle(manifest):
        progress.note(f"the ONNX file was not tried: {obstacle}")
        return
    try:
        with Engine(OnnxRuntimeEngine(work, manifest)) as engine:
            if (inputs := zero_inputs(manifest)) is not None:
                engine.run(inputs)
    except LoRAError as error:
        raise ModelError(
            f"{output / ONNX_FILE} would not run: {_told(error, work, output)}"
        ) from error


def zero_inputs(manifest: Manifest) -> dict[str, Array] | None:
    """Return zeros for every input of a graph but LoRA's, at the sizes that a plan is tuned for.

    None where a size has no range.
    """
    (ranges,) = manifest.profiles.values() or ({},)
    own = [binding for binding in manifest.inputs if binding.name not in manifest.lora_inputs]
    if not ranges and any(isinstance(size, str) for b in own for size in b.shape):
        return None
    shapes = {b.name: ranges[b.name].opt if ranges else b.shape for b in own}
    return {b.name: np.zeros([*map(int, shapes[b.name])], storage_dtype(b.dtype)) for b in own}


def _told(error: Exception, work: Path, output: Path) -> str:
    """What went wrong, in one line, of the directory as it will be."""
    return " ".join(str(error).replace(str(work), str(output)).split())


def try_onnx_files(work: Path, output: Path, manifest: Manifest, progress: Progress) -> None:
    """Open every ONNX file and decode a token with the base model; a note says which cannot be.

    Args:
        work: the finished directory.
        output: where it will be, for messages.
        manifest: of the engine.
        progress: takes the note.

    Raises:
        ModelError: a file cannot be opened or run; the message names it.
    """
    if obstacle := _obstacle(manifest):
        progress.note(f"the ONNX files were not tried: {obstacle}")
        return
    for file, read in _files(manifest):
        if (needed := _memory(read)) > (free := free_host_memory()):
            progress.note(
                f"{file} was not tried: it takes about {needed / 1e9:.1f} GB of memory, "
                f"{free / 1e9:.1f} GB are free"
            )
            continue
        try:
            with Engine(OnnxRuntimeEngine(work, read)) as engine:
                _decode(engine)
        except LoRAError as error:
            told = _told(error, work, output)
            raise ModelError(
                f"{output / file} would not run: {told}; build it with another --dtype, and "
                "report this message with the model's config.json"
            ) from error


def _obstacle(manifest: Manifest) -> str:
    """Reason why the files cannot be run here; empty if they can."""
    if manifest.dtype == "bfloat16":
        return "ONNX Runtime has no bfloat16 on the CPU"
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        return f"onnxruntime cannot be imported ({error}); pip install 'trt-lora[cpu]'"
    return ""


def _memory(manifest: Manifest) -> int:
    """Bytes that the weights of a file take while it runs.

    Where it has no operator for products by codes, ONNX Runtime makes the floats of all of them at
    the beginning of a run, and transposes them.
    """
    stored = [manifest.files.get(name) for name in (ONNX_WEIGHTS_FILE, ENCODER_FILES.weights)]
    itemsize = storage_dtype(manifest.dtype).itemsize
    coded = manifest.weights.values()
    codes = sum(kind.nbytes(itemsize) for kind in coded)
    floats = sum(record.size_bytes for record in stored if record is not None) - codes
    has_own = ONNX_CPU_FILE in manifest.files
    made = sum(math.prod(kind.shape) for kind in coded if not has_own or kind.is_float)
    return codes + floats * _FLOAT32_BYTES // itemsize + 2 * made * itemsize


def _files(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Each file, with a manifest of an engine that reads it."""
    if ONNX_CPU_FILE in manifest.files:
        yield ONNX_CPU_FILE, manifest
    others = {name: file for name, file in manifest.files.items() if name != ONNX_CPU_FILE}
    yield ONNX_FILE, replace(manifest, files=others)


def _decode(engine: Engine) -> None:
    """Prefill a prompt of one token, and decode the next where the engine has room for it."""
    tokens = min(2, engine.manifest.max_seq_len - 1)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    engine.generate([0], sampling=sampling, sources=_source(engine.manifest.encoder))


def _source(encoder: EncoderPart | None) -> Source | None:
    """A token or silence, for an engine that reads a source."""
    if encoder is None or not encoder.takes_features:
        return None if encoder is None else [0]
    return np.zeros([int(size) for size in encoder.source.shape[1:]], np.float32)
