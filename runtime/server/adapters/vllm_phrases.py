"""The words by which clients of vLLM know why an adapter is refused."""

import json
from pathlib import Path
from typing import Any

from trt_lora.runtime.manifest import Manifest

_LARGER_RANK = "LoRA rank {} is greater than max_lora_rank {}"


def vllm_phrases(path: Path, manifest: Manifest) -> list[str]:
    """Return what vLLM 0.33 says of the `adapter_config.json` of an adapter, if there is one.

    Source: vllm/lora/peft_helper.py.
    """
    config = _config(path)
    modules, init, rank = (config.get(n) for n in ("modules_to_save", "init_lora_weights", "r"))
    found = []
    if isinstance(rank, int) and rank > manifest.max_lora_rank:
        found.append(_LARGER_RANK.format(rank, manifest.max_lora_rank))
    if modules and not _are_saved(modules, manifest):
        found.append(f"Unsupported modules_to_save: {modules!r:.100}")
    if config.get("use_dora") and not manifest.lora_vectors:
        found.append("this server does not yet support DoRA")
    if config.get("bias", "none") != "none" and not manifest.lora_vectors:
        found.append("Adapter bias is not supported")
    if isinstance(init, str):
        found.append(f"init_lora_weights={init!r:.40}")
    return found


def _are_saved(modules: object, manifest: Manifest) -> bool:
    """Whether the engine takes all of an adapter's whole modules, named by ends of their paths."""
    return isinstance(modules, list) and all(
        any(path.endswith(str(name)) for path in manifest.saved_modules) for name in modules
    )


def _config(path: Path) -> dict[str, Any]:
    file = path / "adapter_config.json" if path.is_dir() else path.with_name("adapter_config.json")
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
