"""vLLM's `LLM`: prompts in, answers out, each with the adapter of its `LoRARequest`."""

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.generation.parameters.default_sampling import sampling_of_model
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.generation.text.chat_template import Chat, Message
from trt_lora.runtime.generation.text.prompts import one_each
from trt_lora.runtime.generation.text.tokenizer import TOKENIZER_FILE, TextTokenizer
from trt_lora.runtime.generation.token import Logprob, Logprobs
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig
from trt_lora.runtime.interfaces.vllm.request import (
    CompletionOutput,
    LoRARequest,
    RequestOutput,
    TokenLogprob,
)
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.serving.generate import Completion, answer_on
from trt_lora.runtime.serving.serving_config import ServingConfig

TextOrTokens = str | Sequence[int] | Mapping[str, Any]  # a mapping has `prompt` or its token ids
Params = SamplingParams | Sequence[SamplingParams] | None
Requests = LoRARequest | Sequence[LoRARequest | None] | None
_Encoded = tuple[Sequence[int], str | None]

_NO_PARAMS = "sampling_params", "has {}, expected SamplingParams"
_NO_REQUEST = "lora_request", "is {}, expected a LoRARequest or a list of them"


class LLM:
    """An engine for many adapters as vLLM's `LLM`; not for several threads at a time.

    Prompts are answered by continuous batching, any number of them. Strings are taken as they are,
    without a chat template, as vLLM's `generate` does; `chat` has one. It is open from its making
    on, until `close`, the end of a `with`, or of the process.
    """

    @checked
    def __init__(
        self,
        model: str | Path,
        *,
        enable_lora: bool = False,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        max_cpu_loras: int | None = None,
        lora_dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        """Open an engine.

        Args:
            model: an engine directory, built with `build-engine --max-loras`; vLLM's is a model.
            enable_lora: requests may have adapters.
            max_loras: as in `LoRAConfig`, as are the next three.
            max_lora_rank: see there.
            max_cpu_loras: see there; the adapter that was asked for least recently is unloaded.
            lora_dtype: see there.
            max_model_len: tokens of a prompt and its answer: the engine's.
            max_num_seqs: sequences at a time; the engine's largest batch by default.
            dtype: "auto", or the engine's.
            tensor_parallel_size: 1: an engine runs in one process.
            seed: of the draws of requests without one, in the order of the requests.
            backend: as in `open_engine`.

        Raises:
            ManifestError, BackendError: as `open_engine`.
            ConfigError: an option is not what the engine has, or the engine takes one adapter at a
                time.
        """
        executor = open_executor(model, backend)
        refuse_encoder(executor.manifest, "LLM")
        _check_limits(executor.manifest, max_model_len, dtype, tensor_parallel_size)
        config = LoRAConfig(max_loras, max_lora_rank, lora_dtype, max_cpu_loras=max_cpu_loras)
        self._engine = Engine(executor, config.store_config(executor.manifest)).__enter__()
        self._release = weakref.finalize(self, self._engine.__exit__, None, None, None)
        self._config, self._enable_lora = config.resolved(self._engine.adapters), enable_lora
        self._scheduler, self._seed = self._engine.serve(ServingConfig(rows=max_num_seqs)), seed
        has_text = (self._engine.directory / TOKENIZER_FILE).is_file()
        decode = self._engine.tokenizer.decode if has_text else None
        self._decode = partial(decode, skip_special_tokens=False) if decode else str
        self._loras: dict[int, LoRARequest] = {}  # what each number means
        self._numbers, self._drawn = itertools.count(), 0  # of requests; answers without a seed

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Release the engine."""
        self._release()

    def get_tokenizer(self) -> TextTokenizer:
        """Return the engine's tokenizer.

        Raises:
            ConfigError: it has none.
        """
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json says, and vLLM's defaults elsewhere.

        Raises:
            ConfigError: the file asks for what is not done here.
        """
        return sampling_of_model(self._engine.directory)

    @checked
    def generate(
        self,
        prompts: TextOrTokens | Sequence[TextOrTokens],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Requests = None,
    ) -> list[RequestOutput]:
        """Answer prompts.

        Args:
            prompts: one or a list: text, {"prompt": text}, {"prompt_token_ids": [...]} or, in a
                list, token ids.
            sampling_params: of all, or one for each; `get_default_sampling_params` by default.
            use_tqdm: without effect: no bar is drawn.
            lora_request: of all, or one for each; None is the base model.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            ConfigError: a prompt, a parameter or a number of them is refused.
            AdapterError: an adapter cannot be read or taken, or its number is another's.
            OutputError: logits are NaN or infinite.
        """
        del use_tqdm
        several = [prompts] if isinstance(prompts, str | Mapping) else prompts
        if not isinstance(several, Sequence) or not several:
            raise ConfigError(
                f"prompts is {shown(prompts)}, expected text, a mapping with prompt or "
                "prompt_token_ids, or a list of one or more"
            )
        batch = [self._encoded(prompt) for prompt in several]
        return self._answer(batch, sampling_params, lora_request)

    @checked
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Requests = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, by the model's chat template.

        Args:
            messages: a conversation, or a list of them.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: as in `generate`.
            add_generation_prompt: as in `Chat`, as are the next two.
            continue_final_message: see there.
            chat_template_kwargs: see there.

        Raises:
            ConfigError: as `generate`; or the model has no chat template, or refuses one of them.
            AdapterError, OutputError: as `generate`.
        """
        del use_tqdm
        if not isinstance(messages, Sequence) or not messages:
            raise ConfigError(
                f"messages is {shown(messages)}, expected a conversation of one message or more, "
                "or a list of conversations"
            )
        is_one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        options = add_generation_prompt, continue_final_message, chat_template_kwargs
        tokenizer = self.get_tokenizer()
        texts = [tokenizer.render(Chat(one, *options)) for one in conversations]
        batch = [(tokenizer.encode_text(text, special_tokens=False), text) for text in texts]
        return self._answer(batch, sampling_params, lora_request)

    def _encoded(self, prompt: Any) -> _Encoded:
        """The token ids of a prompt, and its text where it is no token ids."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            return self.get_tokenizer().encode_text(text), text
        if not isinstance(prompt, Mapping):
            return prompt, None
        if prompt.keys() != {"prompt_token_ids"}:
            raise ConfigError(
                f"a prompt has {', '.join(map(str, prompt)) or 'nothing'}, expected prompt or "
                "prompt_token_ids alone"
            )
        return prompt["prompt_token_ids"], None

    def _answer(
        self, batch: Sequence[_Encoded], sampling_params: Params, lora_request: Requests
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _of_each(sampling_params, batch, SamplingParams, *_NO_PARAMS)
        params = [self._seeded(given) for given in params]
        loras = _of_each(lora_request, batch, LoRARequest | None, *_NO_REQUEST)
        self._load(dict.fromkeys(filter(None, loras)))
        prompts = [
            (ids, each, lora.lora_name if lora else None)
            for (ids, _), each, lora in zip(batch, params, loras, strict=True)
        ]
        answers = answer_on(self._scheduler, prompts)
        return [
            RequestOutput(
                str(next(self._numbers)),
                text,
                list(ids),
                [self._output(answer, lora) for answer in several],
                lora,
                self._with_text(several[0].prompt_logprobs),
            )
            for (ids, text), several, lora in zip(batch, answers, loras, strict=True)
        ]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Parameters with a seed; each answer has one of its own where none is given."""
        if params.seed is not None:
            return params
        seed = ((self._seed << 32) + self._drawn) % (1 << 64)
        self._drawn += params.n
        return replace(params, seed=seed)

    def _load(self, requests: Collection[LoRARequest]) -> None:
        """Load adapters whose numbers are new; then no more than `max_cpu_loras`, but these."""
        adapters, limit = self._engine.adapters, self._config.max_cpu_loras or 0
        for request in requests:
            if not self._enable_lora:
                raise ConfigError("LoRA is not enabled! pass enable_lora=True to LLM")
            known = self._loras.get(request.adapter_id)
            if known is None:
                adapters.load(request.lora_name, request.lora_path)
                self._loras[request.adapter_id] = request
            elif known != request:
                raise AdapterError(
                    f"LoRA {request.adapter_id} is {known.lora_name!r} from {known.lora_path}, and "
                    f"not {request.lora_name!r} from {request.lora_path}; give it a number of its "
                    "own"
                )
            adapters.bindings.touch(request.lora_name)
        idle = {one.lora_name: i for i, one in self._loras.items() if one not in requests}
        oldest = [name for name in adapters.bindings.by_use if name in idle]
        for name in oldest[: max(len(self._loras) - limit, 0)]:
            del self._loras[idle[name]]
            adapters.unload(name)

    def _output(self, answer: Completion, lora: LoRARequest | None) -> CompletionOutput:
        known, ids = answer.logprobs, list(answer.token_ids)
        chosen = zip(known or (), ids, strict=False)
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=ids,
            cumulative_logprob=None if known is None else sum(f[i].logprob for f, i in chosen),
            logprobs=self._with_text(known),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            lora_request=lora,
        )

    def _with_text(self, known: Sequence[Logprobs | None] | None) -> Any:
        """Log probabilities with the text of their tokens; None where there are none."""
        if known is None:
            return None
        return [one and {token: self._named(token, p) for token, p in one.items()} for one in known]

    def _named(self, token: int, known: Logprob) -> TokenLogprob:
        return TokenLogprob(known.logprob, known.rank, self._decode([token]))


def _of_each(given: Any, prompts: Sequence[Any], kind: Any, option: str, problem: str) -> list[Any]:
    """What all prompts are given, or each of them; `problem` is that of another kind."""
    is_one = isinstance(given, kind)
    several = [given] * len(prompts) if is_one else one_each(option, given, prompts)
    for one in several:
        if not isinstance(one, kind):
            raise ConfigError(f"{option} {problem.format(shown(one))}")
    return several


def _check_limits(
    manifest: Manifest, max_model_len: int | None, dtype: str, tensor_parallel_size: int
) -> None:
    if max_model_len not in (None, manifest.max_seq_len):
        raise ConfigError(
            f"max_model_len is {max_model_len}, this engine has {manifest.max_seq_len}; leave it "
            f"out, or build one with --max-seq-len {max_model_len}"
        )
    if dtype not in ("auto", manifest.dtype):
        raise ConfigError(
            f"dtype is {shown(dtype)}, this engine is {manifest.dtype}; leave it out, or build one "
            "with another --dtype"
        )
    if tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}; an engine runs in one process, on "
            "one GPU: leave it out"
        )
