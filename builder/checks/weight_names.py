"""Refuse targets that no layer has, by the names in the weight files.

Headers are read alone, before torch is imported.
"""

from collections.abc import Iterable, Iterator, Mapping

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.weight_files import StoredWeight
from trt_lora.builder.targets import Targets, check_targets_matched
from trt_lora.plugins.contract.modules import EXPERT_PARAMETERS, is_embedding
from trt_lora.plugins.contract.sites import Site

# Types whose output head has no name of the table.
_OTHER_HEADS = (
    *("bert", "bert-generation", "big_bird", "biogpt", "camembert", "data2vec-text", "electra"),
    *("ernie", "modernbert-decoder", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
)
# Types whose linears the names of their weights tell. transformers may rename any weight of another
# type while it loads it: such a type waits for its modules.
KNOWN_TYPES = (
    *_OTHER_HEADS,
    *("apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere_compass_text"),
    *("ctrl", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "ernie4_5", "exaone4", "falcon"),
    *("fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text"),
    *("gemma4_unified", "gemma4_unified_text", "glm", "glm4", "got_ocr2", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_neox_japanese", "gptj", "granite", "helium", "hrm_text"),
    *("hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm3", "llama"),
    *("minicpm3", "ministral", "ministral3", "mistral", "moshi"),
    *("nanochat", "nemotron", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi", "phi3"),
    *("phi4_multimodal", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    *("vaultgemma", "xglm", "youtu"),
    *("cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    *("hunyuan_v1_moe", "kolibri1", "mellum", "minimax_m2"),
    *("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)
# The ends of names that transformers renames or splits, and what it makes of them, by type.
_RENAMED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hrm_text": {
        "attn.gqkv_proj": tuple(f"self_attn.{part}_proj" for part in ("gate", "q", "k", "v")),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    "lfm3": {"self_attn.gate_proj": ("self_attn.g_proj",)},
}
_HEAD = "lm_head"  # no weight of its own where it is tied to the embedding


def check_weight_names(checkpoint: Checkpoint, targets: Targets) -> None:
    """Refuse targets that no weight belongs to.

    Targets are left to the modules for a type that is not in `KNOWN_TYPES`, and everything without
    `.safetensors` and GGUF files.

    Args:
        checkpoint: of the model.
        targets: what is to get LoRA.

    Raises:
        ConfigError: a target matches no linear of the model.
        ModelError: its weight files are damaged or incomplete.
    """
    if checkpoint.gguf is None and not any(checkpoint.directory.glob("*.safetensors")):
        return
    fields, weights = checkpoint.fields, checkpoint.weights
    model_type = fields.get("model_type")
    if model_type in KNOWN_TYPES:
        paths = _linear_paths(model_type, weights)
        taken = (path for path in paths if targets.has_embedding or not is_embedding(path))
        sites = [Site(path, 0, 0, "") for path in taken]
        check_targets_matched(targets, sites, ())


def _linear_paths(model_type: str, weights: Iterable[StoredWeight]) -> Iterator[str]:
    """The module paths of a model's matrices, embeddings included, and of its head.

    Experts have matrices of their own in files alone: in a model those of a layer are one tensor.
    """
    if model_type not in _OTHER_HEADS:
        yield _HEAD
    for weight in weights:
        before, of_experts, _ = weight.name.partition(".experts.")
        if of_experts:
            yield from (f"{before}{of_experts}{name}" for name in EXPERT_PARAMETERS)
        elif len(weight.shape) == 2:
            yield from _module_paths(model_type, weight.name.rpartition(".")[0])


def _module_paths(model_type: str, path: str) -> tuple[str, ...]:
    """The modules that a weight becomes part of: most often one, of the weight's own path."""
    renamed = _RENAMED.get(model_type, {})
    return next((parts for end, parts in renamed.items() if path.endswith(end)), (path,))
