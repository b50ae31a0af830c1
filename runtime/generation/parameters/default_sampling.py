"""Sampling parameters that a model recommends: the `generation_config.json` of an engine.

Every field is honoured, known not to change which tokens are chosen here, or refused by name. Where
the file does not name one, the default is that of `SamplingParams`, as in vLLM: transformers' own
top-k of 50 is not applied. But without `do_sample`, answers are greedy, as in transformers, and
without a number of tokens they have up to 64. Its stop tokens are in the manifest already.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.generation.parameters.sampling_params import GREEDY, SamplingParams

GENERATION_FILE = "generation_config.json"

_HONOURED = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
}

# Without effect where `do_sample` is not true: transformers, whose file it is, is greedy then.
_OF_DRAWS = ("temperature", "top_k", "top_p", "min_p")

# Tokens of the manifest, the engine's own limits, how transformers computes, returns or speculates.
_WITHOUT_EFFECT = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("max_length", "max_cache_len", "use_cache", "cache_implementation", "cache_config"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "return_legacy_cache", "remove_invalid_values"),
        *("renormalize_logits", "length_penalty", "early_stopping", "diversity_penalty"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "speculation_type", "use_mtp", "compile_config"),
        *("disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size"),
        "transformers_version",
    }
)

# Values that mean the field is off, for what is refused otherwise.
_OFF: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "token_healing": (False,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
}

_NEXT_STEP = "pass sampling parameters of your own, or --generation-config none"


@checked
def default_sampling(directory: str | Path) -> SamplingParams:
    """Return what the `generation_config.json` of an engine recommends.

    Without the file, or where `do_sample` is not true: greedy, as in transformers.

    Raises:
        ConfigError: the file is damaged, a field is unknown or asks for what is not done here, a
            value is out of its range.
    """
    return _sampling_of(Path(directory), {"max_tokens": GREEDY.max_tokens}, is_drawn=False)


def sampling_of_model(directory: Path) -> SamplingParams:
    """Return the same as vLLM's `LLM` takes it: by its own defaults, whatever `do_sample` says.

    Raises:
        ConfigError: as `default_sampling`.
    """
    return _sampling_of(directory, {}, is_drawn=True)


def _sampling_of(directory: Path, defaults: Mapping[str, Any], *, is_drawn: bool) -> SamplingParams:
    """What the file asks for; `is_drawn` takes the fields that vLLM takes, as it takes them."""
    path = directory / GENERATION_FILE
    try:
        found = read_json(path) if path.is_file() else {}
        fields = {name: value for name, value in found.items() if value is not None}
        for name, value in fields.items():
            _check(name, value)
        given = {ours: fields[name] for name, ours in _HONOURED.items() if name in fields}
        if is_drawn:
            given.pop("stop", None)
        elif not fields.get("do_sample", False):
            given = {n: v for n, v in given.items() if n not in _OF_DRAWS} | {"temperature": 0.0}
        return SamplingParams(**{**defaults, **given})
    except AdapterError as error:  # of a file that is no JSON
        raise ConfigError(f"{error}; build the engine again, or {_NEXT_STEP}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {_NEXT_STEP}") from error


def _check(name: str, value: object) -> None:
    """Refuse a field that asks for what is not done here."""
    if name == "do_sample" and type(value) is not bool:
        raise ConfigError(f"do_sample is {shown(value)}, expected true or false")
    if name in _HONOURED or name in _WITHOUT_EFFECT or name == "do_sample" or name.startswith("_"):
        return
    if name not in _OFF:
        raise ConfigError(f"{name} is {shown(value)}, and this field is unknown")
    if value not in _OFF[name]:
        raise ConfigError(
            f"{name} is {shown(value)}, which is not done here; expected {_OFF[name][0]}"
        )
