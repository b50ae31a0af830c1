"""An engine for many adapters on a fake TensorRT: stacks stay, and a step brings its slots."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.deferred_executor import DeferredExecutor
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import CopyKind
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import (
    DOWN,
    MAX_BATCH,
    UP,
    engine_directory,
    expected_logits,
    slots_manifest,
)
from support.models.tiny_model_runs import NO_ADAPTER, adapter, expected_answer, manager_of
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.runtime import SamplingParams, TensorMap
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.topk import TopKRun
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import token_inputs
from trt_lora.runtime.manifest import RUNTIME_CACHE_FILE
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy
from trt_lora.runtime.store.store import AdapterStore

SLOTS = 3
WEIGHTS: dict[str | None, dict[str, Array]] = {
    None: NO_ADAPTER,
    "a": adapter(3, UP, DOWN),
    "b": adapter(2, DOWN),
    "c": adapter(1, UP),
    "d": adapter(4, UP, DOWN),
    "e": {name: -array for name, array in adapter(4, UP, DOWN).items()},
}
NAMES = [name for name in WEIGHTS if name is not None]


@pytest.fixture
def slot_engine(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """The tiny model with a static cache and slots, not entered."""
    trt.manifest = slots_manifest(SLOTS)
    return TensorRTEngine(engine_directory(tmp_path / "slots", trt.manifest), trt.manifest)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A file for each adapter."""
    found = {name: tmp_path / f"{name}.safetensors" for name in NAMES}
    for name, path in found.items():
        save_file(WEIGHTS[name], path)
    return found


def loaded(engine: TensorRTEngine, files: dict[str, Path], names: str = "abcde") -> AdapterStore:
    adapters = AdapterStore(engine)
    for name in names:
        adapters.load(name, files[name], strict=False)
    return adapters


def step_inputs(engine: TensorRTEngine, rows: int) -> TensorMap:
    """The inputs of a decode step of empty rows, all of token 0."""
    cache = KVCache(engine.manifest, engine.memory, MAX_BATCH)
    ids, lengths = np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)
    arrays = token_inputs(ids, lengths, np.arange(rows), cache.max_len)
    tensor_map = TensorMap({name: tensor_from_numpy(array) for name, array in arrays.items()})
    tensor_map.update(cache.views(0, rows))
    return tensor_map


def logits_of(run: TopKRun) -> Array:
    """Run; return logits [rows, vocab]."""
    run.enqueue()
    return np.stack(run.result().logits(range(MAX_BATCH)))


def are_right(logits: Array, ids: Iterable[int], names: Sequence[str | None]) -> bool:
    """Whether logits [rows, vocab] are those of one token and one adapter each."""
    pairs = zip(ids, names, strict=True)
    expected = [expected_logits(np.array([token]), WEIGHTS[name])[0] for token, name in pairs]
    return np.allclose(logits, expected, rtol=1e-4, atol=1e-4)


def switches(count: int) -> Iterator[tuple[str, list[str | None]]]:
    """The name of an adapter to load anew, or none, and the adapters of a step's rows."""
    random = np.random.default_rng(5)
    for _ in range(count):
        few = [None, *random.choice(NAMES, SLOTS, replace=False)]
        yield random.choice(["", *NAMES]), list(random.choice(few, MAX_BATCH))


def test_a_plan_for_many_adapters_is_opened_on_tensorrt(
    slot_engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with open_executor(slot_engine.directory, "tensorrt") as engine:
        assert engine.memory.device == "cuda:0"
        assert isinstance(engine, TensorRTEngine)
        engine.warm_up()


def test_rows_have_adapters_of_their_own(
    slot_engine: TensorRTEngine, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        adapters = loaded(engine, files)
        names = ["a", None, "b", "a"]
        step = TensorMap({**step_inputs(engine, 4), **adapters.bindings.rows(names)})
        outputs = engine.execute(step)
        assert are_right(outputs["logits"].numpy(), [0] * 4, names)
        names = ["e", "d", None, "a"]
        step = TensorMap({**step_inputs(engine, 4), **adapters.bindings.rows(names)})
        outputs = engine.execute(step)
        assert are_right(outputs["logits"].numpy(), [0] * 4, names)


def test_a_thousand_switches_of_the_rows_adapters_capture_nothing_after_the_first(
    slot_engine: TensorRTEngine, cuda: FakeCuda, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        adapters = loaded(engine, files)
        names: list[str | None] = [None] * MAX_BATCH
        tensor_map = TensorMap({**step_inputs(engine, MAX_BATCH), **adapters.bindings.rows(names)})
        run = engine.prepare_topk(tensor_map, logits="logits", fed="input_ids")
        logits_of(run)
        captured = cuda.names().count("cudaStreamBeginCapture")
        placed = set(adapters.bindings.slots.items())
        for anew, names in switches(1000):
            if anew:
                adapters.unload(anew)
                adapters.load(anew, files[anew], strict=False)
            bindings = adapters.bindings.rows(names)
            assert all(
                (bindings[name].pointer, bindings[name].shape)
                == (tensor_map[name].pointer, tensor_map[name].shape)
                for name in engine.manifest.lora_inputs - {LORA_SLOT}
            )
            ids = np.arange(MAX_BATCH) + len(placed)
            run.inputs["input_ids"][:, 0] = ids % 11
            run.inputs[LORA_SLOT][:] = bindings[LORA_SLOT].numpy()
            assert are_right(logits_of(run), ids % 11, names)
            placed |= adapters.bindings.slots.items()
        launched = cuda.names().count("cudaGraphLaunch")
        assert cuda.names().count("cudaStreamBeginCapture") == captured == 1
        assert launched == 1000
    assert len(placed) > 2 * SLOTS  # slots had many adapters


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_a_scheduler_that_is_prepared_captures_and_compiles_no_step_of_its_first_requests(
    slot_engine: TensorRTEngine,
    cuda: FakeCuda,
    files: dict[str, Path],
    rows: int,
    sizes: list[int],
) -> None:
    def compiled() -> set[bytes]:
        kernels = (slot_engine.directory / RUNTIME_CACHE_FILE).read_bytes().splitlines()
        return {line for line in kernels if b", 1]" in line}

    with slot_engine as engine:
        adapters = loaded(engine, files)
        adapters.bindings.rows([*"abc"[:rows]])  # in slots: all requests begin at once
        batch = scheduler_of(engine, adapters, rows=rows)
        batch.prepare()
        assert cuda.names().count("cudaGraphInstantiate") == len(sizes)
        warm = compiled()  # on disk, whatever comes
        assert all(any(b"input_ids[%d, 1]" % size in line for line in warm) for size in sizes)
        before = len(cuda.calls)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        names = {batch.submit([3, 1, 4], sampling, adapter=name): name for name in "abc"[:rows]}
        answers: dict[int, list[int | None]] = {number: [] for number in names}
        while batch:
            for token in step_of(batch):
                answers[token.sequence_id].append(token.token_id)
        assert "cudaGraphInstantiate" not in cuda.names()[before:]
    for number, name in names.items():
        assert answers[number] == expected_answer([3, 1, 4], 4, WEIGHTS[name])
    assert compiled() == warm


def test_a_scheduler_with_requests_is_not_warmed_up(
    slot_engine: TensorRTEngine, cuda: FakeCuda, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        batch = scheduler_of(engine, loaded(engine, files))
        batch.submit([1], SamplingParams(max_tokens=1, ignore_eos=True))
        batch.prepare()
        assert "cudaGraphInstantiate" not in cuda.names()
        (token,) = step_of(batch)
    assert token.token_id is not None


def test_an_adapter_is_copied_behind_the_default_streams_work_and_the_step_waits_for_it(
    slot_engine: TensorRTEngine, cuda: FakeCuda, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        adapters = loaded(engine, files)
        names: list[str | None] = ["a"] * MAX_BATCH
        tensor_map = TensorMap({**step_inputs(engine, MAX_BATCH), **adapters.bindings.rows(names)})
        run = engine.prepare_topk(tensor_map, logits="logits", fed="input_ids")
        logits_of(run)
        before, copied = len(cuda.calls), len(cuda.copies)
        bindings = adapters.bindings.rows(["b"] * MAX_BATCH)
        activation = cuda.names()[before:]
        assert "cudaStreamSynchronize" not in activation  # the host goes on
        assert activation.count("cudaMemcpyAsync") == len(engine.manifest.lora_bindings) + 1
        assert {copy.kind for copy in cuda.copies[copied:]} == {CopyKind.cudaMemcpyHostToDevice}
        run.inputs[LORA_SLOT][:] = bindings[LORA_SLOT].numpy()
        before = len(cuda.calls)
        logits = logits_of(run)
        step = cuda.names()[before:]
        order = [
            step.index(n) for n in ("cudaEventRecord", "cudaStreamWaitEvent", "cudaGraphLaunch")
        ]
        assert order == sorted(order)
        assert are_right(logits, [0] * MAX_BATCH, ["b"] * MAX_BATCH)


@pytest.mark.usefixtures("hurrying")
def test_sequences_join_and_leave_with_adapters_of_their_own(
    slot_engine: TensorRTEngine, files: dict[str, Path], cuda: FakeCuda
) -> None:
    """Greedy ones alone are begun a step ahead, on the device."""
    joined: dict[int, tuple[list[int], str | None, int]] = {}
    answers: dict[int, list[int]] = {}
    with slot_engine as engine:
        adapters = loaded(engine, files)
        background = DeferredExecutor()
        adapters._prefetcher._thread = background  # type: ignore[assignment]
        batch = scheduler_of(engine, adapters)

        def join(prompt: list[int], name: str | None, tokens: int) -> None:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
            joined[batch.submit(prompt, sampling, adapter=name)] = (prompt, name, tokens)

        def step(count: int) -> None:
            for _ in range(count):
                background.run()
                for token in step_of(batch):
                    assert token.token_id is not None
                    answers.setdefault(token.sequence_id, []).append(token.token_id)

        join([3, 1, 4], "a", 5)
        join([1], None, 9)
        step(2)
        join([5, 9, 2], "b", 4)
        join([8, 9], "c", 10)
        step(4)
        join([2, 7], "d", 6)  # takes the slot that a had
        step(3)
        join([6, 5, 3, 5], "e", 3)
        join([1, 2], "e", 3)
        while batch:
            step(1)
        adapters.check_integrity()
    for row, (prompt, name, tokens) in joined.items():
        assert answers[row] == expected_answer(prompt, tokens, WEIGHTS[name]), (row, name)


@pytest.mark.usefixtures("hurrying")
def test_answers_to_one_prompt_have_its_adapter_in_copied_rows(
    slot_engine: TensorRTEngine, files: dict[str, Path]
) -> None:
    """At a temperature near zero, every draw is the greedy token."""
    alike = SamplingParams(max_tokens=6, temperature=1e-9, n=3, ignore_eos=True, seed=0)
    with slot_engine as engine:
        batch = scheduler_of(engine, loaded(engine, files))
        batch.submit([1], SamplingParams(max_tokens=9, ignore_eos=True, temperature=0), adapter="b")
        step_of(batch)
        rows = batch.submit_all([3, 1, 4], alike, adapter="d")
        answers: dict[int, list[int | None]] = {row: [] for row in rows}
        while batch:
            for token in step_of(batch):
                answers.setdefault(token.sequence_id, []).append(token.token_id)
    assert [answers[row] for row in rows] == [expected_answer([3, 1, 4], 6, WEIGHTS["d"])] * 3


def test_a_manager_binds_one_adapter_for_all_rows(
    slot_engine: TensorRTEngine, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        manager = manager_of(engine)
        for name, path in files.items():
            manager.load_weights(name, path, strict=False)
        names = ["d", None, "a"]
        for active in ("a", "d", None, "b"):
            manager.switch_weights(active) if active else manager.reset_weights()
            names = [active] * 3
            bound = TensorMap()
            manager.refresh_tensor_map(bound)
            assert bound[LORA_SLOT].shape == (1,)
            outputs = engine.execute(TensorMap({**step_inputs(engine, 3), **bound}))
            assert are_right(outputs["logits"].numpy(), [0] * 3, names)


def test_the_ranks_of_an_adapter_lie_beside_it(
    slot_engine: TensorRTEngine, files: dict[str, Path]
) -> None:
    with slot_engine as engine:
        adapters = loaded(engine, files)
        ranks = adapters.bindings.rows(["a", "b", "c"])[LORA_RANK].numpy()
        found = [ranks[adapters.bindings.slots[name]].tolist() for name in "abc"]
        assert found == [[3, 3], [0, 2], [1, 0]]


def test_a_decoder_gives_every_row_of_a_step_its_adapter(
    slot_engine: TensorRTEngine, files: dict[str, Path]
) -> None:
    """Three rows in a run of four, of which the last takes no adapter."""
    with slot_engine as engine:
        adapters = loaded(engine, files)
        decoder = StaticDecoder(engine, adapters.bindings.rows([None]), MAX_BATCH)
        for row in range(3):
            decoder.cache.admit(row)
        for count, names in enumerate((["a", None, "b"], ["e", "d", None], [None, "c", "c"]), 1):
            decoder.use_adapter(adapters.bindings.rows(names))
            logits = decoder.decode(np.zeros(3, np.int64))
            ids = np.zeros(count, np.int64)
            expected = [expected_logits(ids, WEIGHTS[name])[-1] for name in names]
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
