"""RunningServer: an engine that runs, and what answers HTTP with it."""

import asyncio
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import ConfigError, LoRAError
from trt_lora.runtime.generation.parameters.default_sampling import sampling_of_model
from trt_lora.runtime.generation.parameters.sampling_params import GREEDY, SamplingParams
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder
from trt_lora.runtime.server.adapters.folder_follower import FolderFollower
from trt_lora.runtime.server.adapters.offered_adapters import OfferedAdapters
from trt_lora.runtime.server.adapters.served_models import NamedPath, ServedModels, load_at_start
from trt_lora.runtime.server.admission import Admission, AdmissionConfig
from trt_lora.runtime.server.answers.answering import Answering, AnswerOptions, Model
from trt_lora.runtime.server.engine_process import wire
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.engine_process.start import start_process, start_thread
from trt_lora.runtime.server.log_lines import LogConfig
from trt_lora.runtime.server.telemetry.metrics import Cache, ServerMetrics
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.store.slot_stacks import slot_nbytes

_LAST_S = 5.0  # that an engine has to end, when it shall
_DTYPES = {"half": "float16", "float": "float32"}  # as vLLM calls them


@dataclass(frozen=True)
class ServerConfig:
    """What a server serves."""

    directory: Path  # of the engine
    backend: str = "auto"
    in_process: bool = False  # the engine runs in a thread of this process
    names: Sequence[str] = ()  # of the base model; the first is the adapters' parent
    lora_roots: Sequence[Path] = ()  # folders below which adapters may lie
    lora_modules: Sequence[NamedPath | tuple[str, str]] = ()  # loaded at the start
    max_model_len: int | None = None  # tokens of prompt and answer; None: the engine's
    max_lora_rank: int | None = None  # of an adapter; None: the engine's
    dtype: str | None = None  # that the engine must have, where a client insists
    generation_config: Path | None = None  # folder of the file with parameters by default
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    max_loras: int | None = None  # adapters that a step can use; None: the engine's
    lora_dir: Path | None = None  # whose adapters are offered, and followed
    lora_dir_refresh_s: float = 5.0  # from one look at it to the next
    hub_repos: Sequence[str] = ()  # of the Hugging Face hub, whose adapters are offered
    max_cpu_loras: int | None = None  # of the largest rank that memory has room for; None: all
    serving: ServingConfig = field(default_factory=ServingConfig)
    log: LogConfig = field(default_factory=LogConfig)  # of the process of the engine


@dataclass
class RunningServer:
    """The engine's client, and what stands on it."""

    client: EngineClient
    models: ServedModels
    admission: Admission
    metrics: ServerMetrics
    answering: Answering
    engine: subprocess.Popen[bytes] | threading.Thread

    def cards(self) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists."""
        return self.models.cards(self.answering.model.manifest.max_seq_len)

    async def known_adapters(self) -> list[dict[str, Any]]:
        """Return what is known of every adapter, its running and waiting requests too."""
        return [self._with_requests(known) for known in await self.models.known()]

    async def known_adapter(self, what: str, name: str) -> dict[str, Any]:
        """Return the same of one, after it was pinned or unpinned if `what` says so.

        Raises:
            HttpError: 404; there is none of that name. 409; it finds no slot to be pinned in.
        """
        return self._with_requests(await self.models.ask(what, name))

    async def close(self) -> None:
        """End the engine, and wait until it has; a process that does not is killed."""
        await self.models.offers.close()
        if not await self.client.close(_LAST_S):
            self.kill()
        await _ended(self.engine)

    def kill(self) -> None:
        """End the engine at once."""
        self.client.abandon()
        if isinstance(self.engine, subprocess.Popen):
            self.engine.kill()

    def _with_requests(self, known: dict[str, Any]) -> dict[str, Any]:
        running, waiting = self.client.requests_of(known["name"])
        return {**known, "running": running, "waiting": waiting}


async def _ended(engine: subprocess.Popen[bytes] | threading.Thread) -> None:
    if isinstance(engine, threading.Thread):
        await asyncio.to_thread(engine.join)
        return
    try:
        await asyncio.to_thread(engine.wait, _LAST_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        await asyncio.to_thread(engine.wait)


async def started(config: ServerConfig) -> RunningServer:
    """Open an engine, load the first adapters, and run a first step.

    Raises:
        LoRAError: as `open_engine` and `AdapterStore.load`; ConfigError: a limit is above the
            engine's, or there is no `lora_dir`.
    """
    engine_manifest = read_manifest(config.directory)
    refuse_encoder(engine_manifest, "the server")
    manifest = _limited(config, engine_manifest)
    tokenizer = TextTokenizer(config.directory)
    folder = config.generation_config
    sampling = SamplingParams() if folder is None else sampling_of_model(folder)
    connection, engine = start_thread() if config.in_process else start_process(config.log)
    store = _store(config, engine_manifest)
    opening = wire.Open(str(config.directory), config.backend, asdict(config.serving), store)
    try:
        client = await EngineClient.open(connection, opening)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and isinstance(engine, subprocess.Popen):
            engine.kill()  # it may read weights for minutes yet
        await _ended(engine)
        raise
    names = config.names or [str(config.directory)]
    roots = [*config.lora_roots, *([config.lora_dir] if config.lora_dir else [])]
    models = ServedModels(client, names, roots, root=str(config.directory), manifest=manifest)
    admission = Admission(config.admission, client.rows)
    cache = Cache(engine_manifest.max_seq_len, manifest.max_seq_len, config.serving.shares_prefixes)
    metrics = ServerMetrics(client, admission, names[0], cache)
    model = Model(manifest, tokenizer, sampling)
    answering = Answering(client, model, models, admission, metrics, config.answers)
    running = RunningServer(client, models, admission, metrics, answering, engine)
    try:
        await load_at_start(models, config.lora_modules)
        await _offer(config, models.offers, manifest)
        await _first_step(client)
    except BaseException:
        await running.close()
        raise
    return running


async def _offer(config: ServerConfig, offers: OfferedAdapters, manifest: Manifest) -> None:
    """Offer the adapters of a folder, and those of repositories."""
    if config.lora_dir is not None:
        folder = AdapterFolder(config.lora_dir, config.lora_roots)
        follower = FolderFollower(folder, offers, manifest, config.lora_dir_refresh_s)
        offers.resolvers.append(follower)
        await follower.start()
    if config.hub_repos:
        from trt_lora.runtime.server.adapters.hub_repos import HubRepos  # of an extra

        offers.resolvers.append(HubRepos(config.hub_repos))


async def _first_step(client: EngineClient) -> None:
    """Run one token: what is compiled or captured at the first step is there then.

    It is counted nowhere.
    """
    answers = await client.submit([[0]], [1], GREEDY, adapter=None)
    for _, event in await answers.take():
        if isinstance(event, LoRAError):
            raise event
    await client.ask("restart")


def _limited(config: ServerConfig, manifest: Manifest) -> Manifest:
    """A manifest with the limits of the flags.

    Raises:
        ConfigError: one is above the engine's.
    """
    dtype = _DTYPES.get(config.dtype or "", config.dtype)
    if dtype not in (None, manifest.dtype):
        raise ConfigError(
            f"--dtype is {config.dtype}, and the engine was built for {manifest.dtype}"
        )
    for flag, wanted, most in (
        ("--max-model-len", config.max_model_len, manifest.max_seq_len),
        ("--max-num-seqs", config.serving.rows, manifest.max_batch_size),
        ("--max-lora-rank", config.max_lora_rank, manifest.max_lora_rank),
        ("--max-loras", config.max_loras, max(manifest.max_loras, 1)),
    ):
        if wanted is not None and not 1 <= wanted <= most:
            raise ConfigError(f"{flag} is {wanted}, expected 1 to {most}, which the engine takes")
    # In memory there are those of slots as well, as in vLLM.
    check_range("--max-cpu-loras", config.max_cpu_loras, config.max_loras or 1)
    return replace(
        manifest,
        max_seq_len=config.max_model_len or manifest.max_seq_len,
        max_lora_rank=config.max_lora_rank or manifest.max_lora_rank,
    )


def _store(config: ServerConfig, manifest: Manifest) -> dict[str, int | None]:
    """The fields of a `StoreConfig`: numbers of adapters as bytes."""
    nbytes = slot_nbytes(replace(manifest, max_loras=max(manifest.max_loras, 1)))
    slots = config.max_loras and config.max_loras * nbytes
    memory = config.max_cpu_loras and config.max_cpu_loras * nbytes
    if manifest.max_loras:
        return {"host_memory": memory, "device_memory": slots}
    return {"host_memory": None, "device_memory": memory}
