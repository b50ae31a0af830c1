"""Refuse what the names in the weight files say: experts, and targets that no layer has.

Headers are read alone, before torch is imported.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trt_lora.builder.checkpoint.weight_files import StoredWeight, read_header, weight_files
from trt_lora.builder.checks.config_fields import EXPERTS, architecture
from trt_lora.builder.model_errors import unsupported
from trt_lora.builder.targets import Targets, check_targets_matched
from trt_lora.plugins.contract.modules import module_of
from trt_lora.plugins.contract.sites import Site

# Types whose checkpoints name every linear as the modules do. transformers renames the weights of
# others while it loads them: those wait for the modules.
PLAIN_TYPES = (
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo"),
    *("olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
)
_HEAD = "lm_head"  # no weight of its own where it is tied to the embedding


def check_weight_names(directory: Path, fields: Mapping[str, Any], targets: Targets) -> None:
    """Refuse experts, and targets that no weight belongs to.

    Targets are left to the modules for a type that is not in `PLAIN_TYPES`, and everything without
    `.safetensors` files.

    Args:
        directory: of the model.
        fields: of its config.json.
        targets: what is to get LoRA.

    Raises:
        ConfigError: a target matches no linear of the model.
        ModelError: it is a mixture of experts, or its weight files are damaged or incomplete.
    """
    if not any(directory.glob("*.safetensors")):
        return
    weights = [weight for file in weight_files(directory) for weight in read_header(file)]
    if any("experts" in weight.name.split(".") for weight in weights):
        raise unsupported(architecture(fields), EXPERTS)
    if fields.get("model_type") in PLAIN_TYPES:
        sites = [Site(path, 0, 0, "") for path in (_HEAD, *_linear_paths(weights))]
        check_targets_matched(targets, sites, ())


def _linear_paths(weights: Iterable[StoredWeight]) -> Iterator[str]:
    """The module paths of matrices whose modules are known by name."""
    for weight in weights:
        path = weight.name.removesuffix(".weight")
        if len(weight.shape) == 2 and module_of(path):
            yield path
