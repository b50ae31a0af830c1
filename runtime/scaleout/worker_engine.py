"""WorkerEngine: an engine with its loop and its adapters, as a worker of several runs it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from trt_lora.runtime.engine import Engine
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.generation.decoding.kv_cache import Prefix
from trt_lora.runtime.generation.parameters.default_sampling import sampling_of_model
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.scaleout.dynamo_options import DynamoOptions
from trt_lora.runtime.scaleout.dynamo_requests import TokenRequest, token_request
from trt_lora.runtime.scaleout.folder_adapters import FolderAdapters
from trt_lora.runtime.scaleout.kept_blocks import KeptBlocks, KeptPrefix
from trt_lora.runtime.scaleout.token_streams import TokenStream, TokenStreams
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.serving.serving_config import ServingConfig, row_count
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.slot_stacks import slot_nbytes

_BLOCK = 16  # tokens


@dataclass(frozen=True)
class WorkerSizes:
    """What there is room for, in Dynamo's words."""

    context_length: int  # tokens of a request with its answer
    kv_cache_block_size: int  # tokens; rows have no blocks, but routers count in them
    total_kv_blocks: int  # in all rows
    max_num_seqs: int  # requests at a time
    max_num_batched_tokens: int  # of a prompt in one step, most
    max_gpu_lora_count: int | None  # slots that the front end is told of


class WorkerEngine:
    """Answers requests with any adapter of its folder, from coroutines of one thread."""

    def __init__(self, options: DynamoOptions) -> None:
        """Read the engine's manifest; it is loaded by `start`.

        Raises:
            ManifestError, BackendError: as `open_executor`.
            ConfigError: it does not take so many rows, or its generation_config.json is refused.
        """
        executor = open_executor(options.engine, options.backend)
        refuse_encoder(executor.manifest, "a worker of Dynamo")
        self._engine = Engine(executor, _store(options, executor.manifest))
        self._folder, self._bases = options.lora_dir, ("", options.base, options.model)
        self._defaults = sampling_of_model(options.engine)
        self._serving = ServingConfig(rows=options.max_num_seqs)
        self.sizes = _sizes(options, executor.manifest, row_count(self._serving, executor.manifest))
        self._blocks = KeptBlocks(_BLOCK)
        self._kept: tuple[Prefix, ...] = ()
        self._told: tuple[Prefix, ...] = ()
        self._open = AsyncExitStack()
        self._scheduler: Scheduler | None = None

    async def start(self) -> None:
        """Load the engine, and start its loop.

        Raises:
            BackendError: it cannot be loaded, or the device has no room.
        """
        await asyncio.to_thread(self._open.enter_context, self._engine)
        self._scheduler = await asyncio.to_thread(self._engine.serve, self._serving)
        self._streams = TokenStreams(self._scheduler, self._note)
        self._open.push_async_callback(asyncio.to_thread, self._streams.loop.close)
        self._store = self._engine.adapters
        files = None if self._folder is None else AdapterFolder(self._folder, roots=())
        self.adapters = FolderAdapters(self._store, files, self._bases)

    async def close(self) -> None:
        """End what runs, and release everything; also what a start that failed has left."""
        await self._open.aclose()

    def _note(self, seconds: float) -> None:
        """Behind each step, in the engine's thread: what rows keep now."""
        del seconds
        assert self._scheduler is not None
        self._kept = self._scheduler.kept

    def block_events(self) -> list[dict[str, Any]]:
        """Return what has become of the blocks that are kept, since it was asked for before."""
        if self._told is self._kept:
            return []
        self._told = self._kept
        names = {self._store.info(name).version: name for name in self._store.names}
        found = [_named(prefix, names) for prefix in self._told]
        return self._blocks.changes([prefix for prefix in found if prefix is not None])

    @property
    def is_lost(self) -> bool:
        """Whether it has failed for good."""
        return self._scheduler is not None and self._streams.loop.is_dead

    def understood(self, request: Mapping[str, Any]) -> TokenRequest:
        """Return what a request asks for.

        Raises:
            ConfigError: as `token_request`.
        """
        return token_request(request, self._defaults)

    @asynccontextmanager
    async def answered(self, asked: TokenRequest) -> AsyncIterator[TokenStream]:
        """Load the adapter that is asked for, and submit; what has not ended then is let go of.

        Raises:
            UnknownAdapterError, AdapterError: the adapter cannot be had.
            ConfigError, BackendError, StateError: as `EngineLoop.submit`.
        """
        async with AsyncExitStack() as stack:
            adapter = None if asked.model in self._bases else asked.model
            if adapter is not None:
                await stack.enter_async_context(self.adapters.using(adapter))
            stream = TokenStream(self._streams)
            stack.callback(stream.close)
            await self._streams.submit(
                stream, asked.prompt, asked.sampling, adapter=adapter, salt=asked.salt
            )
            yield stream

    @property
    def load(self) -> dict[str, Any]:
        """What is in use now, in Dynamo's words."""
        assert self._scheduler is not None
        running, counts = self._scheduler.running, self._scheduler.counts
        blocks, rows = self.sizes.total_kv_blocks, self.sizes.max_num_seqs
        return {
            "kv_used_blocks": running * blocks // rows,
            "kv_total_blocks": blocks,
            "gpu_cache_usage": running / rows,
            "kv_cache_hit_rate": counts.shared / counts.asked if counts.asked else None,
        }

    def exposition(self, labels: Mapping[str, str]) -> str:
        """Return metrics of adapters in Prometheus' text.

        Args:
            labels: of every series.
        """
        stats = self._store.stats
        of_all = ",".join(f'{name}="{value}"' for name, value in labels.items())
        families = (
            ("trt_lora:adapter_slots", "gauge", stats.slots),
            ("trt_lora:adapters_in_slots", "gauge", stats.in_slots),
            ("trt_lora:adapters_in_memory", "gauge", stats.in_memory),
            ("trt_lora:adapter_copies_to_slot_total", "counter", stats.copies),
            ("trt_lora:adapter_reads_total", "counter", stats.reads),
        )
        lines = [f"# TYPE {name} {kind}\n{name}{{{of_all}}} {n}\n" for name, kind, n in families]
        return "".join(lines)


def _sizes(options: DynamoOptions, manifest: Manifest, rows: int) -> WorkerSizes:
    slots = options.max_gpu_lora_count
    return WorkerSizes(
        context_length=manifest.max_seq_len,
        kv_cache_block_size=_BLOCK,
        total_kv_blocks=rows * manifest.max_seq_len // _BLOCK,
        max_num_seqs=rows,
        max_num_batched_tokens=manifest.max_input_len,
        max_gpu_lora_count=(manifest.max_loras if slots is None else slots) or None,
    )


def _store(options: DynamoOptions, manifest: Manifest) -> StoreConfig:
    """Room for so many adapters of the largest rank."""
    nbytes = slot_nbytes(replace(manifest, max_loras=max(manifest.max_loras, 1)))
    limit = options.max_cpu_loras and options.max_cpu_loras * nbytes
    where = "host_memory" if manifest.max_loras else "device_memory"
    return StoreConfig(**{where: limit})


def _named(prefix: Prefix, names: Mapping[int, str]) -> KeptPrefix | None:
    """A prefix with its adapter's name; None where that means another version by now."""
    key, salt = cast("tuple[tuple[str, int] | None, str | None]", prefix.key)
    if key is None:
        return KeptPrefix(prefix.tokens, None, salt)
    name = names.get(key[1])
    return None if name is None else KeptPrefix(prefix.tokens, name, salt)
