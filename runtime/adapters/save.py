"""Save an adapter in the format of another tool; lossless, or refused."""

from dataclasses import replace
from pathlib import Path

from trt_lora.plugins.atomic_files import publish_directory, publish_file
from trt_lora.plugins.checked import check_choice, checked
from trt_lora.plugins.contract.sites import MIN_RANK, BindingNames, dummy_value
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.fitting.fit import match_adapter
from trt_lora.runtime.adapters.formats.edgellm import save_edgellm
from trt_lora.runtime.adapters.formats.onnx_adapter import save_onnxruntime
from trt_lora.runtime.adapters.formats.peft import save_peft
from trt_lora.runtime.adapters.formats.trtllm import save_trtllm
from trt_lora.runtime.adapters.weight import Weight, filled
from trt_lora.runtime.manifest import Manifest

FORMATS = ("peft", "trtllm", "edgellm", "onnxruntime")
DTYPES = ("float32", "float16", "bfloat16")


@checked
def save_adapter(
    adapter: Adapter,
    path: str | Path,
    format: str,
    *,
    dtype: str | None = None,
    manifest: Manifest | None = None,
) -> Conversion:
    """Write an adapter.

    Args:
        adapter: what `load_adapter` returned.
        path: the directory to make (peft, trtllm, edgellm) or the file (onnxruntime); it appears
            when it is complete.
        format: one of FORMATS.
        dtype: of the tensors; None keeps the adapter's own, but edgellm is float16, which its
            runtime takes, and onnxruntime the engine's, which nothing would cast to later.
        manifest: of an engine that the result is for: checked against it, named as it names its
            inputs, fused or split as it is; an `.onnx_adapter` then has every LoRA input, zeros
            where the adapter has nothing.

    Returns:
        What casts changed.

    Raises:
        ConfigError: format or dtype are none of the choices, something is at `path`, or an
            `.onnx_adapter` is asked for an engine whose inputs hold several adapters.
        AdapterError: the format cannot hold the adapter, or the engine cannot take it.
    """
    path = Path(path)
    check_choice("format", format, FORMATS)
    check_choice("dtype", dtype or DTYPES[0], DTYPES)
    if path.exists():
        raise ConfigError(f"{path} exists; choose another place")
    if format == "onnxruntime" and manifest and manifest.max_loras:
        raise ConfigError(
            f"an engine with {manifest.max_loras} slots takes stacks of adapters, and an "
            ".onnx_adapter holds one; leave out the engine, or give one built without --max-loras"
        )
    adapter.check_usable()
    weights = dict(adapter.weights)
    if manifest is not None:
        weights, _ = match_adapter(adapter, manifest)
        adapter = replace(adapter, weights=weights)
    elif adapter.base_copies:
        name = next(iter(adapter.base_copies))
        raise AdapterError(
            f"{adapter.source}: {name} cannot be left out: {adapter.unusable_keys[name]}; or pass "
            "the engine that the result is for, to compare it with the engine's (--engine)"
        )
    fingerprint = manifest.base_model.fingerprint if manifest else adapter.base_fingerprint
    if format == "onnxruntime":
        named = _complete(weights, manifest) if manifest else adapter.named(BindingNames.LORA)
        with publish_file(path) as work:
            wanted = dtype or (manifest.dtype if manifest else _dtype(adapter))
            return save_onnxruntime(named, work, wanted, adapter.source)
    with publish_directory(path) as work:
        if format == "peft":
            return save_peft(adapter, work, dtype, fingerprint)
        if format == "edgellm":
            return save_edgellm(adapter, work, dtype or "float16", fingerprint)
        return save_trtllm(adapter, work, dtype or _dtype(adapter))


def _dtype(adapter: Adapter) -> str:
    """The dtype of every tensor, or float32 where they differ."""
    dtypes = {weight.dtype for weight in adapter.weights.values()}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _complete(weights: dict[str, Weight], manifest: Manifest) -> dict[str, Weight]:
    """Every LoRA input of the engine, a rank-1 zero where there is no weight."""
    return {
        name: weights.get(name)
        or filled(site.shape(factor, MIN_RANK), site.dtype, dummy_value(factor))
        for name, (site, factor) in manifest.lora_bindings.items()
    }
