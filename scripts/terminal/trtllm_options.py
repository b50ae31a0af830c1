"""Options of TensorRT-LLM's `trtllm-build` that mean nothing here: each with a sentence."""

from collections.abc import Sequence

from trt_lora.builder.config import DTYPES
from trt_lora.plugins.errors import ConfigError

_STATIC = "the KV cache is static, a row for each sequence, written in place"

# What the option does there is done here, always or never.
IGNORED = {
    "--gemm-plugin": "TensorRT chooses the kernels of matrix products by itself",
    "--gpt-attention-plugin": "attention is an operator of the graph, which TensorRT fuses",
    "--context-fmha": "TensorRT fuses attention for prompts without an option",
    "--use-fused-mlp": "TensorRT fuses the MLP's operators without an option",
    "--remove-input-padding": "prompts run in chunks of their own, so there is little padding",
    "--paged-kv-cache": _STATIC,
    "--kv-cache-type": _STATIC,
    "--use-paged-context-fmha": _STATIC,
    "--tokens-per-block": _STATIC,
    "--max-num-tokens": "a step takes up to --max-batch-size rows of --max-input-len tokens",
    "--opt-num-tokens": "plans are optimized for one token a row, and for a prompt",
    "--gather-context-logits": "the caller chooses for which tokens a step returns logits",
    "--gather-generation-logits": "the caller chooses for which tokens a step returns logits",
    "--strongly-typed": "graphs have the types of --dtype throughout",
    "--workers": "an engine is built for one GPU",
    "--reduce-fusion": "it is of several GPUs, and an engine runs on one",
    "--multiple-profiles": "a plan has two profiles, decode and prefill",
    "--log-level": "what TensorRT says is shown where a build fails",
    "--lora-ckpt-source": "the format of an adapter is recognised",
}

# What is asked for can only be had in another way.
REFUSED = {
    "--tp-size": "tensor parallelism is not built; leave it out: an engine runs on one GPU",
    "--pp-size": "pipeline parallelism is not built; leave it out: an engine runs on one GPU",
    "--model-config": "config.json is that of the model; pass its folder to --model",
    "--checkpoint-dir": "there is no converted checkpoint; pass the transformers model to --model",
    "--max-beam-width": "there is no beam search; leave it out",
    "--max-prompt-embedding-table-size": "there is no prompt tuning; leave it out",
    "--speculative-decoding-mode": "there is no speculative decoding; leave it out",
    "--use-dora": "engines take DoRA by another option; pass --lora-vectors",
}

_GPUS = ("--tp-size", "--pp-size")  # how many; one is what there is


def without_trtllm_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take out what means nothing here.

    Args:
        words: of the command line, options spelled with dashes.

    Returns:
        The other words, and a sentence for each option that was taken out.

    Raises:
        ConfigError: an option asks for what is not there.
    """
    kept: list[str] = []
    notes: list[str] = []
    for option, values in _options(words):
        name, _, value = option.partition("=")
        reason = ""
        if name in _GPUS and {value, *values} & {"1"}:
            reason = "an engine runs on one GPU"
        elif name in REFUSED:
            raise ConfigError(f"{name}: {REFUSED[name]}")
        elif name in IGNORED:
            reason = IGNORED[name]
        elif name == "--lora-plugin" and {value, *values} & {*DTYPES}:
            reason = "LoRA computes in --dtype; here the option says which nodes a plan has"
        if reason:
            notes.append(f"{name} is left out: {reason}")
        else:
            kept += [option, *values]
    return kept, notes


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each option with the values behind it; words before the first are one by themselves."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if options and not word.startswith("--"):
            options[-1][1].append(word)
        else:
            options.append((word, []))
    return options
