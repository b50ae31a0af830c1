"""Batches of many adapters while others load, replace, unload and pin them: never another's answer.

Every token is compared with what the adapter that its sequence leased gives when it is alone.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config
from support.schedulers import answers_of, scheduler_of

from trt_lora.plugins.errors import StateError, UnknownAdapterError
from trt_lora.runtime import (
    AdapterStore,
    Engine,
    SamplingParams,
    Scheduler,
    StoreConfig,
    open_engine,
)

SLOTS, ROWS, STEPPERS, LOADERS = 3, 5, 2, 2
NAMES = ("n0", "n1", "n2", "n3")  # of each loader: nobody else changes what they mean
RANKS = (1, 2, 3, 4, 6, 8)  # one file each
PROMPTS = ((5, 6, 7, 8, 9, 10, 11), (40, 41), (3, 4, 5) * 5)
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)

Tokens = tuple[int, ...]


def run(seconds: float) -> int:
    """Build a tiny engine with slots and stress it; return the number of tokens checked."""
    with tempfile.TemporaryDirectory() as scratch:
        files = prepare(Path(scratch))
        with open_engine(Path(scratch) / "engine", "onnxruntime") as engine:
            return Stress(engine, files).run(seconds)


def prepare(folder: Path) -> list[Path]:
    """Build the engine in `folder / "engine"`; return the adapters."""
    model = save_model("Llama", folder / "model")
    quick_build(tiny_config(model, folder / "engine", max_loras=SLOTS, max_batch_size=ROWS))
    return [save_adapter(model, folder / f"r{r}", seed=r, r=r) for r in RANKS]


@dataclass
class Answers:
    """What every file answers to every prompt alone, and which file a version is of."""

    of_file: Mapping[tuple[int | None, int], Tokens]  # file (None: base model), prompt
    hashes: Sequence[str]  # of each file's weights
    files: dict[int, int] = field(default_factory=dict)  # version -> file, from its loader

    def check(self, row: "Row") -> None:
        """Compare what a sequence has so far.

        Raises:
            AssertionError: another adapter answered.
        """
        if row.version is None:
            expected = self.of_file[None, row.prompt]
        else:
            file = self._file(row.version)
            assert row.content_hash == self.hashes[file], f"{row} leased another file than {file}"
            expected = self.of_file[file, row.prompt]
        assert tuple(row.tokens) == expected[: len(row.tokens)], f"{row}, alone {expected}"

    def _file(self, version: int) -> int:
        """Return the file of a version, as soon as its loader has written it down."""
        end = time.monotonic() + 10
        while version not in self.files:
            assert time.monotonic() < end, f"nobody loaded version {version}"
            time.sleep(1e-3)
        return self.files[version]


@dataclass
class Row:
    """A sequence under way, and what it leased."""

    prompt: int
    version: int | None = None
    content_hash: str = ""
    tokens: list[int] = field(default_factory=list)


class Stress:
    """Loaders and steppers over one cache of adapters."""

    def __init__(self, engine: Engine, files: Sequence[Path]) -> None:
        """Ask every file alone first."""
        self.engine, self.files = engine, files
        self.answers = _alone(engine, files)
        probe = AdapterStore(engine)
        limit = SLOTS * LOADERS * probe.load("largest", files[-1]).nbytes // 2
        self.cache = AdapterStore(engine, StoreConfig(host_memory=limit))
        self.over = Event()

    def run(self, seconds: float) -> int:
        """Return the number of tokens compared, none of them wrong.

        Raises:
            AssertionError: one was wrong; StateError: the cache does not add up.
        """
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(LOADERS + STEPPERS) as pool:
            loaders = [pool.submit(self._load, seed) for seed in range(LOADERS)]
            steppers = [pool.submit(self._step, seed, end) for seed in range(STEPPERS)]
            try:
                checked = [stepper.result() for stepper in steppers]
            finally:
                self.over.set()
            for loader in loaders:
                loader.result()
        self.cache.check_integrity()
        self.cache.close()
        assert self.cache.stats.leased == 0
        return sum(checked)

    def _load(self, seed: int) -> None:
        """Change what the names of one loader mean, in any order."""
        order, cache = random.Random(seed), self.cache
        while not self.over.is_set():
            name = f"{seed}.{order.choice(NAMES)}"
            deed = order.choice(("load", "load", "register", "unload", "pin", "unpin", "prefetch"))
            with suppress(StateError, UnknownAdapterError):
                if deed in ("load", "register"):
                    self._put(deed, name, order.randrange(len(self.files)))
                elif deed == "prefetch":
                    cache.prefetch(name).result()
                else:
                    getattr(cache, deed)(name)
            cache.check_integrity()
            time.sleep(order.random() / 200)

    def _put(self, deed: str, name: str, file: int) -> None:
        if deed == "load":
            self.cache.load(name, self.files[file], replace=True)
        else:
            with suppress(UnknownAdapterError):
                self.cache.unload(name)
            self.cache.register(name, self.files[file])
        self.answers.files[self.cache.info(name).version] = file

    def _step(self, seed: int, end: float) -> int:
        """Run sequences of any adapter until the time is over; return how many tokens they had."""
        order, checked = random.Random(100 + seed), 0
        batch = scheduler_of(self.engine, self.cache, rows=ROWS, max_num_batched_tokens=4)
        rows: dict[int, Row] = {}
        while time.monotonic() < end:
            self._join(batch, rows, order)
            answers = batch.step()
            assert not answers.failed
            for token in answers.tokens.values():
                assert token.token_id is not None
                rows[token.sequence_id].tokens.append(token.token_id)
                checked += 1
                if token.finish_reason:
                    self.answers.check(rows.pop(token.sequence_id))
            if rows and order.random() < 0.1:
                cancelled = order.choice(list(rows))
                batch.cancel(cancelled)
                self.answers.check(rows.pop(cancelled))
            self.cache.check_integrity()
        batch.clear()
        return checked

    def _join(self, batch: Scheduler, rows: dict[int, Row], order: random.Random) -> None:
        if len(batch) == ROWS:
            return
        row = Row(order.randrange(len(PROMPTS)))
        if order.random() < 0.2:
            rows[batch.submit(PROMPTS[row.prompt], SAMPLING)] = row
            return
        name = f"{order.randrange(LOADERS)}.{order.choice(NAMES)}"
        with suppress(StateError, UnknownAdapterError):
            lease = self.cache.lease(name)
            row.version, row.content_hash = lease.version, lease.content_hash
            rows[batch.submit(PROMPTS[row.prompt], SAMPLING, adapter=lease)] = row


def _alone(engine: Engine, files: Sequence[Path]) -> Answers:
    """Every file's answers, which differ, from a cache and batches of its own."""
    found: dict[tuple[int | None, int], Tokens] = {}
    hashes = []
    for file, path in _with_base(files):
        adapters = AdapterStore(engine)
        if path is not None:
            adapters.load("alone", path)
            hashes.append(adapters.info("alone").content_hash)
        name = None if path is None else "alone"
        for prompt, ids in enumerate(PROMPTS):
            (answer,) = answers_of(engine, adapters, [list(ids)], [name], SAMPLING)
            found[file, prompt] = answer.token_ids
    for prompt in range(len(PROMPTS)):
        answers = {tokens for (_, asked), tokens in found.items() if asked == prompt}
        assert len(answers) == len(files) + 1, f"prompt {prompt}: two adapters answer alike"
    return Answers(found, hashes)


def _with_base(files: Sequence[Path]) -> Iterator[tuple[int | None, Path | None]]:
    yield None, None
    yield from enumerate(files)
