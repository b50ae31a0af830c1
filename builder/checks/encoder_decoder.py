"""What an encoder-decoder's options may be, how long its sources, and the rules of its answers."""

from typing import Any

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.config import DEFAULT_MAX_SOURCE_LEN, BuildConfig
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.generation.parameters.default_sampling import GENERATION_FILE
from trt_lora.runtime.manifest import TokenRules

_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
_START = "decoder_start_token_id"
# What else Whisper's file says: tokens of a prompt, and how transformers finds time stamps.
_OF_PROMPTS = (
    *("alignment_heads", "forced_decoder_ids", "is_multilingual", "lang_to_id", "task_to_id"),
    *("max_initial_timestamp_index", "median_filter_width", "no_timestamps_token_id"),
    *("prev_sot_token_id", "return_timestamps"),
)
RULES = (_START, *_FORCED, *_SUPPRESSED, *_OF_PROMPTS)  # fields that are no sampling parameters
_FIXED = "max_source_positions"  # of Whisper, whose features are all of one length


def check_options(config: BuildConfig, checkpoint: Checkpoint) -> None:
    """Refuse options that are not for the model.

    Raises:
        ConfigError: one is for encoder-decoders alone and the model is none, or the reverse.
    """
    if not checkpoint.is_encoder_decoder:
        if config.max_source_len is not None:
            raise ConfigError(f"--max-source-len: {config.model} has no encoder; leave it out")
        return
    codes = checkpoint.quantisation
    for is_given, option in (
        (config.quantize != "none", f"--quantize {config.quantize}"),
        (codes is not None, f"a checkpoint in codes ({codes.method if codes else ''})"),
        (config.lora_vectors, "--lora-vectors"),
        (bool(config.lora_saved_modules), "--lora-saved-modules"),
        (config.lora_plugin == "aot", "--lora-plugin aot"),
    ):
        if is_given:
            raise ConfigError(
                f"{option} is for decoders alone, and {config.model} is an encoder-decoder; "
                "leave it out"
            )


def choose_source_len(config: BuildConfig, model_config: Any, positions: int | None) -> int:
    """Return how many positions a row of the cross cache has.

    Args:
        config: the options.
        model_config: transformers' config of an encoder-decoder.
        positions: how many tokens a source may have; None if nothing limits them.

    Raises:
        ConfigError: the option is not what the model has, or beyond it.
    """
    wanted, fixed = config.max_source_len, getattr(model_config, _FIXED, None)
    most = fixed or positions
    if wanted is not None and most is not None and (wanted > most or fixed not in (None, wanted)):
        raise ConfigError(
            f"--max-source-len is {wanted}, but the model's sources have "
            f"{most} positions{'' if fixed else ' at most'}; leave it out"
        )
    return int(fixed or wanted or min(DEFAULT_MAX_SOURCE_LEN, most or DEFAULT_MAX_SOURCE_LEN))


def token_rules(checkpoint: Checkpoint, config: Any) -> TokenRules:
    """Return what generation_config.json says of an answer's tokens; without one, config.json.

    Raises:
        ModelError: it names what are no tokens, or none that an answer begins behind.
    """
    stated = checkpoint.generation or checkpoint.fields

    def tokens(name: str) -> tuple[int, ...]:
        value = stated.get(name, checkpoint.fields.get(name) if name == _START else None)
        several = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(t) is int and 0 <= t < config.vocab_size for t in several):
            raise ModelError(
                f"{checkpoint.directory}: {name} is {shown(value)}, expected tokens from 0 to "
                f"{config.vocab_size - 1}"
            )
        return tuple(several)

    start = tokens(_START)
    if len(start) != 1:
        raise ModelError(
            f"{checkpoint.directory}: {_START} is {shown(list(start))}, and an answer begins "
            f"behind one token; name it in {GENERATION_FILE}"
        )
    first, last = (next(iter(tokens(name)), None) for name in _FORCED)
    suppressed, suppressed_first = map(tokens, _SUPPRESSED)
    return TokenRules(start[0], first, last, suppressed, suppressed_first)
