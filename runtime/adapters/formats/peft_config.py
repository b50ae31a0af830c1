"""PEFT `adapter_config.json`: honoured, ignored and refused fields.

The fields are those of PEFT 0.21's `LoraConfig`. A field that is not in any of the lists comes from
another release; it is refused unless it is unset, for nobody knows what it does to the result.
"""

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_lora.plugins.contract.modules import EXPERT_PARAMETERS, is_embedding, is_experts, is_head
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.formats.peft_targets import (
    FIELDS,
    MAX_STEPS,
    PARAMETERS,
    ModulePatterns,
    ends_of,
    is_parameter,
    pattern_problem,
)
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.untrusted_file import file_inside

CONFIG_FILE = "adapter_config.json"

_HONOURED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_HONOURED |= {*FIELDS} - {PARAMETERS}  # of which some are refused

# They steer training or bookkeeping.
# fan_in_fan_out is used by PEFT for merging alone; VeLoRA's forward pass differs in training alone.
_WITHOUT_EFFECT = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size",
    "runtime_config", "ensure_weight_tying", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "velora_config",
})  # fmt: skip

_REFUSED = {
    "alora_invocation_tokens": "activated LoRA switches on in mid-sequence; train a plain LoRA",
    "use_qalora": "QA-LoRA pools the input before A; train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA has other factors than A and B; train a plain LoRA",
    "monteclora_config": "MonteCLoRA samples its weights; train a plain LoRA",
    "arrow_config": "Arrow routes between adapters per token; load the adapters by themselves",
    "megatron_config": "Megatron's parallel layers are not supported; save a plain LoRA",
    "init_lora_weights": "this initialisation changed the base weights; convert the adapter with "
    "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) and load the result",
}
_MERGED = {  # refused too, but PEFT can merge them
    PARAMETERS: "the adapter targets parameters that are neither a matrix `weight` nor the "
    "gate_up_proj or down_proj of experts",
    "kasa_config": "KaSA truncates the base weight",
    "layer_replication": "the base model's layers are repeated",
}
_TOKENS = "trainable_token_indices"
_SAVED = "modules_to_save"
_ROWS = {  # an engine's embedding, or its head, may be a site
    _TOKENS: "the adapter changes the token embeddings",
    _SAVED: "the adapter replaces whole modules of the base model",
}
_VECTORS = {  # an engine may have inputs for them
    "use_dora": "DoRA rescales the base weight, which an engine cannot do at run time",
    "lora_bias": "the adapter adds a bias beside B",
    "bias": "the adapter changes biases of the base model",
}

_PATTERNS = "module patterns and numbers"
_BIASES = (None, "none", "all", "lora_only")
_BIAS = "none, all or lora_only"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class PeftConfig:
    """The fields that decide which modules are adapted, and the scale of each."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    base_model: str | None = None
    use_dora: bool = False
    lora_bias: bool = False
    trains_biases: bool = False
    tokens: Any = None  # `trainable_token_indices`, of the embedding or by modules
    tokens_from: str = ""
    saved: tuple[str, ...] = ()  # `modules_to_save`: ends of paths of embeddings and heads
    saved_from: str = ""
    ties_saved: bool = False  # whether a head that is tied to a saved embedding is saved too
    peft_version: str = field(default="", compare=False)
    vectors_from: str = ""  # the field that asks for vectors, and what to do without
    targeting: dict[str, Any] = field(default_factory=dict, compare=False)  # fields of target_rule

    @cached_property
    def _ranks(self) -> ModulePatterns:
        return ModulePatterns(self.rank_pattern)

    @cached_property
    def _alphas(self) -> ModulePatterns:
        return ModulePatterns(self.alpha_pattern)

    def check_work(self, names: Sequence[str], file: Path) -> None:
        """Refuse patterns that would take minutes to match with tensors of these names.

        Raises:
            AdapterError: they would.
        """
        if self._ranks.steps(names) + self._alphas.steps(names) > MAX_STEPS:
            raise AdapterError(
                f"{file}: its rank and alpha patterns would take minutes to match with "
                f"{len(names)} tensors; write the modules' names instead"
            )

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Its `target_parameters`."""
        return frozenset(self.targeting.get(PARAMETERS) or ())

    def tokens_of(self, path: str) -> tuple[int, ...]:
        """Return the tokens of the rows of the module at `path`, in the order of the file."""
        if isinstance(self.tokens, dict):
            return tuple(next((self.tokens[e] for e in ends_of(path) if e in self.tokens), ()))
        return tuple(self.tokens or ())

    def is_saved(self, path: str) -> bool:
        """Return whether the module at `path` was saved whole; PEFT compares ends of paths."""
        is_tied = self.ties_saved and any(map(is_embedding, self.saved)) and is_head(path)
        return is_tied or (bool(self.saved) and path.endswith(self.saved))

    def rank(self, path: str) -> int:
        """Return the rank of the module at `path`."""
        return int(self._ranks.value(self._key(path), self.r))

    def scale(self, path: str) -> float:
        """Return what the module's delta is multiplied by: alpha / r, rsLoRA alpha / sqrt(r).

        rsLoRA: https://huggingface.co/papers/2312.03732.
        """
        rank, alpha = self.rank(path), float(self._alphas.value(self._key(path), self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _key(self, path: str) -> str:
        """What PEFT matches patterns with: of a target parameter its own name."""
        is_weight = not is_experts(path) and is_parameter(path, self.parameters)
        return f"{path}.weight" if is_weight else path


def read_peft_config(directory: Path) -> PeftConfig:
    """Read `adapter_config.json` in `directory`.

    Raises:
        AdapterError: it is missing, is no LoRA config, or has a field that must be refused.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterError(
            f"{directory} has no {CONFIG_FILE}: it is not a PEFT adapter directory. "
            "Pass the folder that PEFT's save_pretrained wrote, or one .safetensors file"
        )
    return parse_peft_config(read_json(file_inside(directory, CONFIG_FILE)), path)


def parse_peft_config(fields: dict[str, Any], path: Path) -> PeftConfig:
    """Return the config that a file's fields are.

    Raises:
        AdapterError: it is no LoRA config, or has a field that must be refused.
    """
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            f"{path}: peft_type is {shown(fields.get('peft_type'))}; only 'LORA' is supported"
        )
    _refuse(fields, path)

    def checked(name: str, is_right: Callable[[Any], bool], expected: str, default: Any) -> Any:
        if not is_right(value := fields.get(name, default)):
            raise AdapterError(f"{path}: {name} is {shown(value)}, expected {expected}")
        return value

    config = PeftConfig(
        r=checked("r", _is_number, "a number", 8),
        lora_alpha=checked("lora_alpha", _is_number, "a number", 8),
        use_rslora=bool(checked("use_rslora", _is_unset_or(bool), "true or false", None)),
        rank_pattern=checked("rank_pattern", _has_numbers, _PATTERNS, None) or {},
        alpha_pattern=checked("alpha_pattern", _has_numbers, _PATTERNS, None) or {},
        base_model=checked("base_model_name_or_path", _is_unset_or(str), "a text", None),
        use_dora=bool(checked("use_dora", _is_unset_or(bool), "true or false", None)),
        lora_bias=bool(checked("lora_bias", _is_unset_or(bool), "true or false", None)),
        trains_biases=checked("bias", _BIASES.__contains__, _BIAS, None) in _BIASES[2:],
        tokens=checked(_TOKENS, _are_tokens, "token ids, each once", None),
        tokens_from=_merge_instead(_TOKENS, fields[_TOKENS], path) if fields.get(_TOKENS) else "",
        saved=tuple(fields.get(_SAVED) or ()),
        saved_from=_merge_instead(_SAVED, fields[_SAVED], path) if fields.get(_SAVED) else "",
        ties_saved=fields.get("ensure_weight_tying") is True,
        peft_version=checked("peft_version", _is_unset_or(str), "a text", None) or "",
        vectors_from=next(
            (_merge_instead(f, fields[f], path) for f in _VECTORS if _is_set(fields, f)), ""
        ),
        targeting={name: fields[name] for name in FIELDS if fields.get(name) is not None},
    )
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if problem := pattern_problem(pattern):
            field = "rank_pattern" if pattern in config.rank_pattern else "alpha_pattern"
            raise AdapterError(f"{path}: {field} has the pattern {shown(pattern)}: {problem}")
    for rank in (config.r, *config.rank_pattern.values()):
        if rank < 1 or rank != int(rank):
            raise AdapterError(f"{path}: a rank is {rank}; ranks are whole numbers from 1")
    return config


def _refuse(fields: dict[str, Any], path: Path) -> None:
    for name, value in fields.items():
        is_known = name in _HONOURED | _WITHOUT_EFFECT | _VECTORS.keys() | {_TOKENS}
        if not value or is_known or (name == _SAVED and _have_rows(value)):
            continue
        if name == PARAMETERS and _are_weights(value):
            continue
        if name == "init_lora_weights" and (value is True or value in _PLAIN_INITS):
            continue
        reason = _REFUSED.get(name, "this release does not know the field; update trt-lora")
        if name in _MERGED or name == _SAVED:
            raise AdapterError(_merge_instead(name, value, path))
        raise AdapterError(f"{path}: {name} is {shown(value)}: {reason}")
    if fields.get("use_dora") and fields.get("lora_bias"):
        raise AdapterError(f"{path}: use_dora and lora_bias are both true; PEFT has no such layer")


def _merge_instead(name: str, value: object, path: Path) -> str:
    """Why a field's adapter is refused, and that it can be merged."""
    reason, advice = (_MERGED | _ROWS | _VECTORS)[name], merge_advice(path.parent)
    what = f"{path}: {name} is {shown(value)}: {reason}"
    return f"{what}; train the adapter without it, or {advice}"


def merge_advice(adapter: object) -> str:
    """Return what to do about an adapter of this path that no engine can take."""
    command = f"trt-lora merge --model DIR --adapter {shlex.quote(str(adapter))} OUT"
    return f"merge it into the base model and build from that: {command}"


def _is_set(fields: dict[str, Any], name: str) -> bool:
    return bool(fields.get(name)) and (name, fields[name]) != ("bias", "none")


def _is_unset_or(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kind)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # NaN is not, and an int may be beyond any float


def _are_tokens(value: object) -> bool:
    """Whether token ids are named, each once: of the embedding, or by the module's name."""
    lists = [*value.values()] if isinstance(value, dict) else [value]
    return value is None or all(
        isinstance(ids, list)
        and all(type(token) is int and token >= 0 for token in ids)
        and len(set(ids)) == len(ids)
        for ids in lists
    )


def _have_rows(modules: object) -> bool:
    """Whether all names are those of embeddings and output heads, which have a row for a token."""
    return isinstance(modules, list) and all(
        isinstance(name, str) and (is_embedding(name) or is_head(name)) for name in modules
    )


def _are_weights(parameters: object) -> bool:
    """Whether all names may be those of matrices, which take LoRA as linears do, or of experts."""
    names = ("weight", *EXPERT_PARAMETERS)
    return isinstance(parameters, list) and all(
        isinstance(name, str) and name.rpartition(".")[2] in names for name in parameters
    )


def _has_numbers(patterns: object) -> bool:
    return not patterns or (
        isinstance(patterns, dict) and all(_is_number(value) for value in patterns.values())
    )
