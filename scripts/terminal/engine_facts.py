"""What an engine is and takes, in words."""

from collections import Counter
from pathlib import Path

from trt_lora.runtime.manifest import ENCODER_FILES, GRAPH, ONNX_WEIGHTS_FILE, EncoderPart, Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.store.slot_stacks import stacks_nbytes


def engine_facts(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Return a line of text for each label."""
    base, modules = manifest.base_model, Counter(s.path.rsplit(".")[-1] for s in manifest.sites)
    return {
        "engine": str(directory),
        "base model": f"{base.name} ({base.architecture})",
        "fingerprint": base.fingerprint,
        "dtype": manifest.dtype,
        "weights": _weights(manifest),
        "plan": _plan(manifest),
        **_takes(manifest),
        **({} if manifest.encoder is None else {"encoder": _encoder(manifest, manifest.encoder)}),
        **_component(manifest),
        "ranks": _ranks(manifest),
        "adapters": _adapters(manifest),
        "sites": f"{len(manifest.sites)}: "
        + ", ".join(f"{name} x {count}" for name, count in modules.items()),
        "versions": ", ".join(f"{tool} {version}" for tool, version in manifest.versions.items()),
    }


def _takes(manifest: Manifest) -> dict[str, str]:
    """How many tokens, or which inputs of a graph."""
    if manifest.kind == GRAPH:
        own = [each for each in manifest.inputs if each.name not in manifest.lora_inputs]
        shapes = (f"{b.name} {b.dtype} [{', '.join(map(str, b.shape))}]" for b in own)
        return {"inputs": ", ".join(shapes)}
    return {
        "lengths": f"{manifest.max_batch_size} rows of {manifest.max_seq_len} tokens, "
        f"{manifest.max_input_len} of them in one step"
    }


def _component(manifest: Manifest) -> dict[str, str]:
    """Which part of a pipeline it is, and how many modules no output depends on."""
    facts = {"component": manifest.component, "no effect": ", ".join(manifest.no_effect)}
    return {label: text for label, text in facts.items() if text}


def _encoder(manifest: Manifest, part: EncoderPart) -> str:
    """What it reads, and bytes of its weights."""
    kind = "features" if part.takes_features else "tokens"
    file = manifest.files.get(ENCODER_FILES.weights)
    size = f", weights of {file.size_bytes / 1e6:.1f} MB" if file else ""
    return f"sources of {kind}, {part.max_source_len} positions{size}"


def _plan(manifest: Manifest) -> str:
    """The library, the kernels of LoRA, and the GPUs."""
    text = f"{manifest.flavour}, LoRA as {manifest.lora_plugin}"
    targets = " and ".join(manifest.compute_capability)
    return f"{text}, for compute capability {targets}" if targets else text


def _ranks(manifest: Manifest) -> str:
    """Those of LoRA, and what an adapter may have saved whole."""
    text = f"1 to {manifest.max_lora_rank}, tuned for {manifest.opt_lora_rank}"
    paths = " and ".join(manifest.saved_modules)
    return f"{text}; {paths} saved whole" if paths else text


def _adapters(manifest: Manifest) -> str:
    """How many an answer may take, and the memory of all slots."""
    if not manifest.max_loras:
        return "one at a time, for all rows"
    return f"{manifest.max_loras} in a batch, in stacks of {stacks_nbytes(manifest) / 1e6:.1f} MB"


def _weights(manifest: Manifest) -> str:
    """Bytes of the weights by their format; the output head has its own."""
    if (file := manifest.files.get(ONNX_WEIGHTS_FILE)) is None:
        return f"in {manifest.dtype}"
    itemsize, parts = storage_dtype(manifest.dtype).itemsize, Counter[str]()
    sites = {site.path for site in manifest.sites}
    for path, kind in manifest.weights.items():
        whose = "linears" if path in sites else path
        whose += f" and {kind.embedding}" if kind.embedding else ""
        scales = "a scale a row" if kind.block == kind.shape[1] else f"block {kind.block}"
        x = ", x too" if kind.is_float and kind.level == "fast" else ""
        parts[f"{whose} {kind.format}{x}, {scales}"] += kind.nbytes(itemsize)
    parts[f"in {manifest.dtype}"] = file.size_bytes - parts.total()
    return "; ".join(f"{name}: {size / 1e6:.1f} MB" for name, size in parts.items())
