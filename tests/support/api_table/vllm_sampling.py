"""vLLM's `SamplingParams`, field by field: what there is of each, for the page of vLLM's users."""

from dataclasses import fields

from trt_lora.runtime.generation.parameters.sampling_params import REFUSED, SamplingParams

# The public fields of `vllm/sampling_params.py` of vLLM 0.33.0, in their order, with defaults.
# `output_kind` is an enumeration there, of which the default is `CUMULATIVE`.
THEIRS: dict[str, object] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "watermarking": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": None,
    "stream_interval": None,
    "skip_clone": False,
    "output_text_buffer_length": 0,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}

# What to know of a field that does what vLLM's does.
_NOTES = {
    "n": "with `LLM`, `generate`, `Scheduler.submit_all` and `EngineLoop.submit`; seeds as vLLM's",
    "temperature": "up to any number; vLLM refuses more than 2, and raises those below 0.01",
    "seed": "64 bits; an answer depends on seed, prompt and adapter alone, whatever runs beside it",
    "stop_token_ids": "the stop token is not among the tokens of an answer",
    "min_tokens": "but what `structured_outputs` asks for ends where nothing can follow",
    "logprobs": "of the engine's own logits: vLLM's `raw_logprobs`",
    "prompt_logprobs": "as `logprobs`; the prompt is run anew, and comes with the first token",
    "structured_outputs": "one of `json`, `regex` and `grammar`, of 64 KiB at most",
}


def sampling_table() -> list[str]:
    """Return the lines of the table."""
    ours = {field.name for field in fields(SamplingParams)}
    assert ours == THEIRS.keys(), ours ^ THEIRS.keys()
    present = len(ours) - len(REFUSED)
    return [
        f"All {len(ours)} fields of vLLM 0.33 are there, in its order and with its defaults.",
        f"{present} do the same; the others are refused by name where they are not their default.",
        "",
        "| field | default | here |",
        "|---|---|---|",
        *(f"| `{name}` | `{default!r}` | {_here(name)} |" for name, default in THEIRS.items()),
    ]


def _here(name: str) -> str:
    return f"*refused:* {REFUSED[name]}" if name in REFUSED else _NOTES.get(name, "present")
