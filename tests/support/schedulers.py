"""Schedulers of the tests: over adapters of their own unless some are given."""

from collections.abc import Sequence

from trt_lora.runtime import (
    AdapterStore,
    Completion,
    Executor,
    SamplingParams,
    Scheduler,
    ServingConfig,
    TextTokenizer,
)
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.serving.generate import answer_all


def scheduler_of(
    engine: Executor,
    adapters: AdapterStore | None = None,
    *,
    rows: int | None = None,
    cache_bytes: int | None = None,
    max_num_batched_tokens: int | None = None,
    shares_prefixes: bool = True,
    max_wait_steps: int = 32,
    max_wait_s: float = 2.0,
    preempt_after: int = 64,
    prefetch_depth: int = 4,
    tokenizer: TextTokenizer | None = None,
) -> Scheduler:
    """Return a scheduler; the options are those of `ServingConfig`."""
    config = ServingConfig(
        rows=rows,
        cache_bytes=cache_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        shares_prefixes=shares_prefixes,
        max_wait_steps=max_wait_steps,
        max_wait_s=max_wait_s,
        preempt_after=preempt_after,
        prefetch_depth=prefetch_depth,
    )
    return Scheduler(engine, adapters or AdapterStore(engine), config, tokenizer=tokenizer)


def answers_of(
    engine: Executor,
    adapters: AdapterStore,
    prompts: Sequence[Prompt],
    names: Sequence[str | None],
    sampling: SamplingParams,
) -> list[Completion]:
    """Answer prompts, each with an adapter of a store that is not the engine's own."""
    return answer_all(engine, adapters, prompts, names, [sampling] * len(prompts), None)
