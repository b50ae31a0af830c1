"""One answer as text, piece by piece."""

from collections.abc import Generator

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.batch import Batch
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.text.prompts import Prompt, encoded
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters


@checked
def stream_text(
    engine: Engine,
    prompt: Prompt,
    *,
    manager: LoRAManager | None = None,
    adapters: SlotAdapters | None = None,
    adapter: Lease | str | None = None,
    sampling: SamplingParams | None = None,
    tokenizer: TextTokenizer | None = None,
) -> Generator[str]:
    """Answer one prompt and yield its text as it comes, together what `generate` returns.

    Bytes that are no whole character yet, and what may begin a stop string, are held back. Nothing
    runs before the first piece is asked for; closing the iterator ends the answer.

    Args:
        engine: a running engine with a tokenizer.
        prompt: as in `generate`.
        manager: as in `generate`.
        adapters: as in `generate`.
        adapter: instead of `adapter_names`: of this prompt.
        sampling: as in `generate`.
        tokenizer: as in `generate`.

    Raises:
        ConfigError: as `generate`; or `sampling` asks for more than text: n, or log probabilities.
        BackendError, UnknownAdapterError, StateError, OutputError: as `generate`.
    """
    tokenizer = tokenizer or TextTokenizer(engine.directory)
    given = default_sampling(engine.directory) if sampling is None else sampling
    sampling = sampling_of(given)
    if sampling.n > 1 or sampling.logprobs is not None:
        raise ConfigError(
            f"n is {sampling.n} and logprobs is {sampling.logprobs}, but a stream is the text of "
            "one answer; call generate"
        )
    (ids,) = encoded([prompt], tokenizer, engine.manifest)
    batch = Batch(engine, manager=manager, adapters=adapters, rows=1, tokenizer=tokenizer)
    try:
        batch.add(ids, sampling, adapter=adapter)
        while batch:
            for token in batch.step():
                yield token.text
    finally:
        batch.clear()  # an adapter is in use as long as its sequence
