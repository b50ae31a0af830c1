"""A worker of NVIDIA Dynamo over an engine: `python -m trt_lora.runtime.scaleout.dynamo ENGINE`."""
# pyright: reportMissingImports=false

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Self

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    lora_name_to_id,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.scaleout.adapter_updates import AdapterUpdates
from trt_lora.runtime.scaleout.dynamo_chunks import DynamoChunks
from trt_lora.runtime.scaleout.dynamo_options import DynamoOptions, dynamo_options
from trt_lora.runtime.scaleout.token_streams import TokenStream
from trt_lora.runtime.scaleout.worker_engine import WorkerEngine, WorkerSizes
from trt_lora.runtime.server.errors import public

_TELL_S = 0.25  # from one look at what is in use to the next


class DynamoWorker(LLMEngine):  # type: ignore[misc] # not installed where this is checked
    """Answers with any adapter of a folder that workers share, and publishes those it is told to.

    The front end sends a name to a worker of its own choice, whichever has published it.
    """

    def __init__(self, options: DynamoOptions) -> None:
        """Read the engine's manifest; errors are those of `WorkerEngine`."""
        self._options = options
        self._engine = WorkerEngine(options)
        self._publisher: Any = None
        self._blocks: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._streams: dict[str, TokenStream] = {}  # by request

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[Self, Any]:
        """Return a worker, and where it is found; errors are those of its options and engine."""
        options = dynamo_options(argv)
        return cls(options), WorkerConfig(**options.worker)

    async def start(self, worker_id: int) -> Any:
        """Open the engine, and say what it has room for."""
        del worker_id
        await self._engine.start()
        self._watching = asyncio.create_task(self._tell())
        return EngineConfig(
            model=self._options.model,
            served_model_name=self._options.base,
            llm=LlmRegistration(**asdict(self._engine.sizes)),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for each token.

        Raises:
            InvalidArgument: a field or the adapter is refused; the message names it.
            Unknown: the engine has failed in this request.
            EngineShutdown: the engine has failed for good; the worker ends.
        """
        with self._reported():
            asked = self._engine.understood(normalize_request_token_ids(request))
            chunks, number = DynamoChunks(asked), context.id()
            async with self._engine.answered(asked) as stream:
                self._streams[number] = stream
                if context.is_stopped():  # while its adapter was loaded
                    stream.cancel()
                try:
                    async for index, token in stream.tokens():
                        yield chunks.chunk(index, token)
                finally:
                    del self._streams[number]
                if stream.is_cancelled:
                    yield chunks.cancelled()

    async def abort(self, context: Any) -> None:
        """Free the rows of a request that nobody waits for."""
        if (stream := self._streams.get(context.id())) is not None:
            stream.cancel()

    async def health_check_payload(self) -> dict[str, Any]:
        """Return the request of one token that shows whether the engine still runs."""
        return dict(build_health_check_payload(bos_token_id=0))

    async def cleanup(self) -> None:
        """Release the engine."""
        if self._watching is not None:
            self._watching.cancel()
        await self._engine.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise Dynamo's errors instead of ours; end the worker whose engine has failed."""
        try:
            yield
        except LoRAError as error:
            if self._engine.is_lost:
                signal.raise_signal(signal.SIGTERM)
                raise EngineShutdown(public(str(error))) from error
            is_asked = isinstance(error, ValueError | KeyError)  # else the engine is at fault
            kind = InvalidArgument if is_asked else Unknown
            raise kind(public(str(error))) from error

    def supported_updates(self) -> set[str]:
        """Return what may be asked of adapters."""
        return {"load_lora", "unload_lora", "list_loras"}

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """Load, unload or list adapters; an error says why nothing has changed."""
        return await self._updates.answer(update, body)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Know where adapters are published."""
        self._updates = AdapterUpdates(
            self._engine.adapters,
            publish=partial(_publish, endpoint, self._options.model, self._engine.sizes),
            retract=partial(unregister_model, endpoint),
            number_of=lora_name_to_id,
        )

    async def register_prometheus(self, metrics: Any) -> None:
        """Add what is known of adapters to the worker's metrics."""
        labels = dict(metrics.auto_labels)
        metrics.register_prometheus_expfmt_callback(partial(self._engine.exposition, labels))

    def component_metrics_dp_ranks(self) -> list[int]:
        """Say that there is one engine."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Keep whom to tell what is in use; any thread may say it."""
        self._publisher = publisher

    async def kv_event_sources(self) -> list[Any]:
        """Say that the front end is told which beginnings of prompts are kept."""
        return [PushSource(on_ready=partial(setattr, self, "_blocks"))]

    async def _tell(self) -> None:
        while True:
            if self._blocks is not None and (events := self._engine.block_events()):
                self._blocks.publish_batch(events)
            if self._publisher is not None:
                self._publisher.publish(0, ComponentSnapshot(dp_rank=0, **self._engine.load))
            await asyncio.sleep(_TELL_S)


async def _publish(endpoint: Any, model: str, sizes: WorkerSizes, name: str) -> None:
    """Tell the front ends of an adapter."""
    config = ModelRuntimeConfig()
    config.context_length = sizes.context_length
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        worker_type=WorkerType.Aggregated,
        needs=[],
        kv_cache_block_size=sizes.kv_cache_block_size,
        runtime_config=config,
        user_data={"lora_adapter": True, "lora_id": lora_name_to_id(name)},
        lora_name=name,
        base_model_path=model,
        ignore_weights=True,
        max_gpu_lora_count=sizes.max_gpu_lora_count,
    )


def main() -> None:
    """Run a worker until it is told to end; what is wrong with its options exits with 2."""
    try:
        run(DynamoWorker)
    except LoRAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    os._exit(0)  # Dynamo's threads abort where they call a Python that is ending


if __name__ == "__main__":
    main()
