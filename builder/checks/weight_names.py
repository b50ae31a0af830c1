"""Refuse targets that no layer has by the names in the weight files: before torch is imported."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trt_lora.builder.checkpoint.weight_files import read_header, weight_files
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


def check_target_names(directory: Path, fields: Mapping[str, Any], targets: Targets) -> None:
    """Refuse targets that no weight of the model belongs to; headers are read alone.

    Nothing is refused of a type that is not in `PLAIN_TYPES`, or without `.safetensors` files: what
    follows tells.

    Args:
        directory: of the model.
        fields: of its config.json.
        targets: what is to get LoRA.

    Raises:
        ConfigError: a target matches no linear of the model.
        ModelError: the weight files are damaged or incomplete.
    """
    if fields.get("model_type") in PLAIN_TYPES and any(directory.glob("*.safetensors")):
        sites = [Site(path, 0, 0, "") for path in (_HEAD, *_linear_paths(directory))]
        check_targets_matched(targets, sites, ())


def _linear_paths(directory: Path) -> Iterator[str]:
    """The module paths of weights that are matrices of modules we know by name."""
    for file in weight_files(directory):
        for weight in read_header(file):
            path = weight.name.removesuffix(".weight")
            if len(weight.shape) == 2 and module_of(path):
                yield path
