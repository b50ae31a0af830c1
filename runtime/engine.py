"""Engine: an engine directory that runs, with its adapters, and answers to prompts."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self, cast, overload

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_value
from trt_lora.runtime.engines.engine import EngineExecutor, Executor, closed, encoder_of
from trt_lora.runtime.engines.graph_inputs import batch_rows, graph_inputs
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.engines.topk import Floats, TopK, TopKRun
from trt_lora.runtime.generation.parameters.adapter_names import Adapters, adapter_names
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.sources import Source, is_single
from trt_lora.runtime.generation.text.prompts import (
    Prompt,
    is_prompt,
    is_text,
    one_each,
    prompt_list,
)
from trt_lora.runtime.generation.text.tokenizer import TOKENIZER_FILE, TextTokenizer
from trt_lora.runtime.manifest import Manifest, refuse_graph
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import Tensor, TensorMap
from trt_lora.runtime.serving.generate import Completion, answer_all, stream_from
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore


class Engine:
    """An engine directory as a context manager; an `Executor` for a runtime of one's own.

    Any number of threads may call its methods while it is open.
    """

    @checked
    def __init__(self, executor: EngineExecutor, config: StoreConfig | None = None) -> None:
        """Take what runs it, and the limits of its adapters' memory."""
        self.executor, self._config = executor, config
        self._lock = Lock()  # of what is made once
        self._adapters: AdapterStore | None = None
        self._tokenizer: TextTokenizer | None = None
        self._is_open = False

    def __repr__(self) -> str:
        """Return where it is from, and whether it is open."""
        state = "open" if self._is_open else "closed"
        return f"<Engine {short_value(str(self.directory))}, {state}>"

    def __enter__(self) -> Self:
        """Load the engine.

        Raises:
            BackendError: it cannot be loaded.
            StateError: it is open already.
        """
        self.executor.__enter__()
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Refuse further runs, wait for those under way in other threads, release everything."""
        self._is_open = False
        with self._lock:
            adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters.close()
        self.executor.__exit__(kind, error, traceback)

    @property
    def adapters(self) -> AdapterStore:
        """The engine's adapters; made when they are first asked for.

        Raises:
            StateError: the engine is closed.
            ConfigError, BackendError: as `AdapterStore`.
        """
        with self._lock:
            if not self._is_open:
                raise closed()
            if self._adapters is None:
                self._adapters = AdapterStore(self.executor, self._config)
            return self._adapters

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the engine's directory, read once.

        Raises:
            ConfigError: there is none, or it cannot be read.
            BackendError: the extra that reads it is not installed.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = TextTokenizer(self.directory)
            return self._tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap] # a string is one prompt
        self,
        prompts: Prompt,
        *,
        adapter: str | None = None,
        scale: float = 1.0,
        sampling: SamplingParams | None = None,
        sources: Source | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        adapter: Adapters = None,
        scale: float = 1.0,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        sources: Sequence[Source] | None = None,
    ) -> list[Completion]: ...

    @overload
    def generate(  # type: ignore[overload-overlap] # token ids are one source
        self,
        prompts: None = None,
        *,
        adapter: str | None = None,
        scale: float = 1.0,
        sampling: SamplingParams | None = None,
        sources: Source,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: None = None,
        *,
        adapter: Adapters = None,
        scale: float = 1.0,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        sources: Sequence[Source],
    ) -> list[Completion]: ...

    @checked
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        *,
        adapter: Adapters = None,
        scale: float = 1.0,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        sources: Source | Sequence[Source] | None = None,
    ) -> Completion | list[Completion]:
        """Answer a prompt, or any number of them, each with its own adapter.

        What finds no row or slot waits for one. An answer depends on its own prompt, the adapter
        and `sampling` alone: the draws of a prompt come from the seed and its tokens, so that equal
        prompts with a seed have equal answers. What else is answered with it can change no more
        than the rounding of the logits; see `Scheduler`.

        Args:
            prompts: a string (a user's message), a conversation of messages, or token ids; or a
                list of prompts. Of an encoder-decoder, what its decoder begins with; left out, its
                own start token.
            adapter: of all prompts, or one for each in their order; None is the base model.
            scale: the strength of the adapters.
            sampling: how tokens are chosen, for all prompts or one for each; what the model's
                generation_config.json says by default, and greedy where it says nothing; see
                `default_sampling`.
            sources: of an encoder-decoder, what its encoder reads: a text, token ids, or features
                [bins, frames]; or a list of these, one for each prompt.

        Returns:
            The answer to a single prompt or source; of a list `sampling.n` answers to each, in
            their order.

        Raises:
            ConfigError: a prompt is beyond the engine's limits, a prompt or stop token is none of
                the model's, text is given and the engine has no tokenizer, there are not as many
                adapters, parameters or sources as prompts, or several answers are asked for to a
                single prompt; an encoder-decoder has no source, or a decoder one; or what
                `sampling` asks for is refused.
            BackendError: structured output is asked for, and llguidance is not installed.
            UnknownAdapterError: no adapter of a name is loaded.
            AdapterError, StateError: an adapter cannot be read, or never have a slot.
            OutputError: the logits are NaN or infinite; the message names the adapter.
        """
        if prompts is None:
            prompts = self._starts(sources)
        is_one = is_prompt(prompts)
        batch = prompt_list([prompts] if is_one else prompts)
        if isinstance(sources, np.ndarray) and not is_one:
            sources = [*sources]
        given = [None] * len(batch) if sources is None else [sources] if is_one else sources
        read = one_each("sources", given, batch)
        params = self._params(batch, sampling)
        if is_one and params[0].n > 1:
            raise ConfigError(f"n is {params[0].n}; pass a list of prompts for a list of answers")
        names = adapter_names(adapter, scale, batch)
        needs_text = any(map(is_text, batch)) or any(p.needs_text for p in params)
        needs_text |= any(isinstance(source, str) for source in read)
        tokenizer = self.tokenizer if needs_text else None
        answers = answer_all(self.executor, self.adapters, batch, names, params, tokenizer, read)
        return answers[0] if is_one else answers

    @checked
    def stream(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        scale: float = 1.0,
        sampling: SamplingParams | None = None,
    ) -> Generator[str]:
        """Answer one prompt and yield its text as it comes, together what `generate` returns.

        Bytes that are no whole character yet, and what may begin a stop string, are held back.
        Nothing runs before the first piece is asked for; closing the iterator ends the answer.

        Args:
            prompt: as in `generate`.
            adapter: its adapter; None is the base model.
            scale: as in `generate`.
            sampling: as in `generate`.

        Raises:
            ConfigError: as `generate`; or `sampling` asks for more than text: n, or log
                probabilities.
            BackendError, UnknownAdapterError, AdapterError, StateError, OutputError: as `generate`.
        """
        (params,) = self._params([prompt], sampling)
        if params.n > 1 or params.listed_logprobs is not None or params.prompt_logprobs is not None:
            raise ConfigError(
                f"n is {params.n}, logprobs is {params.logprobs} and prompt_logprobs is "
                f"{params.prompt_logprobs}, but a stream is the text of one answer; call generate"
            )
        (name,) = adapter_names(adapter, scale, [prompt])
        yield from stream_from(self.serve(ServingConfig(rows=1)), prompt, params, adapter=name)

    @checked
    def run(
        self, inputs: Mapping[str, Array], *, adapter: Adapters = None, scale: float = 1.0
    ) -> dict[str, Array]:
        """Run the graph once on all inputs but LoRA's, and return every output, on the host.

        Args:
            inputs: by name, in the dtypes and shapes that the manifest says.
            adapter: of all rows, or one for each entry of the batch dimension, which may differ
                where the engine is built with `--max-loras`; None is the base model.
            scale: of the adapters.

        Raises:
            TensorError: an input is missing or unknown, the engine refuses its shape or dtype, or
                nothing says how many rows there are.
            ConfigError: there are not as many adapters as rows.
            StateError: there are more adapters than slots, or several and no slots, or others hold
                all slots.
            UnknownAdapterError, AdapterError: as `generate`.
        """
        rows: Sequence[object] = [()]
        if adapter is not None and not isinstance(adapter, str):
            rows = range(batch_rows(self.manifest, inputs))
        names = adapter_names(adapter, scale, rows, "row")
        with self.adapters.bindings.held(names) as lora:
            outputs = self.execute(TensorMap(lora | graph_inputs(self.manifest, inputs)))
            return {output: tensor.numpy().copy() for output, tensor in outputs.items()}

    @checked
    def serve(self, config: ServingConfig | None = None) -> Scheduler:
        """Return a scheduler of requests, which come at any time; see there.

        Raises:
            StateError: the engine is closed.
            ConfigError, BackendError: as `Scheduler`.
        """
        refuse_graph(self.manifest, "serve")
        has_text = (self.directory / TOKENIZER_FILE).is_file()
        tokenizer = self.tokenizer if has_text else None
        return Scheduler(self.executor, self.adapters, config, tokenizer=tokenizer)

    def _params(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        refuse_graph(self.manifest, "generate")
        if sampling is None:
            sampling = default_sampling(self.directory)
        if not isinstance(sampling, Sequence):
            return [sampling] * len(prompts)
        return [sampling_of(given) for given in one_each("sampling", sampling, prompts)]

    def _starts(self, sources: object) -> list[int] | list[list[int]]:
        """The prompt of each source: the token that the model's answers begin behind."""
        encoder = self.manifest.encoder
        if encoder is None or sources is None:
            raise ConfigError(
                "there is no prompt; an encoder-decoder begins without one, if it has sources"
            )
        start = [encoder.rules.start]
        return start if is_single(sources) else [start for _ in cast("Sequence[Source]", sources)]

    # ----------------------------------------------------------------- an executor of its own

    @property
    def directory(self) -> Path:
        """The engine directory."""
        return self.executor.directory

    @property
    def manifest(self) -> Manifest:
        """See `Executor`."""
        return self.executor.manifest

    @property
    def encoder(self) -> Executor | None:
        """What runs its encoder, while it is open; None of a decoder alone."""
        return encoder_of(self.executor)

    @property
    def memory(self) -> Memory:
        """See `Executor`."""
        return self.executor.memory

    @property
    def rank_multiple(self) -> int:
        """See `Executor`."""
        return self.executor.rank_multiple

    @property
    def input_names(self) -> Sequence[str]:
        """See `Executor`."""
        return self.executor.input_names

    @property
    def output_names(self) -> Sequence[str]:
        """See `Executor`."""
        return self.executor.output_names

    def warm_up(self) -> None:
        """See `EngineExecutor`."""
        self.executor.warm_up()

    def release_inputs(self) -> None:
        """See `Executor`."""
        self.executor.release_inputs()

    @checked
    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """See `Executor`."""
        return self.executor.execute(tensor_map)

    @checked
    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> TopKRun:
        """See `Executor`."""
        return self.executor.prepare_topk(tensor_map, logits=logits, fed=fed)

    @checked
    def topk(self, logits: Tensor, temperatures: Floats) -> TopK:
        """See `Executor`."""
        return self.executor.topk(logits, temperatures)


@checked
def open_engine(
    directory: str | Path,
    backend: str = "auto",
    *,
    check: str = "fast",
    adapters: StoreConfig | None = None,
) -> Engine:
    """Return the engine of a directory, to be used as a context manager.

    Args:
        directory: what `build-engine --output` made.
        backend: "tensorrt", "onnxruntime", or "auto"; see `open_executor`.
        check: "fast" or "full"; see `open_executor`.
        adapters: how much memory its adapters may take.

    Raises:
        ManifestError, ConfigError, BackendError: as `open_executor`.
    """
    return Engine(open_executor(directory, backend, check=check), adapters)
