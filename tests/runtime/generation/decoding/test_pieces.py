"""Prompts on ONNX Runtime run in pieces, and answer as token after token."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from support.fakes.slot_engine import SlotEngine, expected_answer, number_file
from support.models.tiny_sizes import VOCABULARY
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding import static_decoder
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder, _host_pieces
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.memory.tensor import Tensor
from trt_lora.runtime.store.store import AdapterStore

ROWS, BEFORE, WIDTH = 2, 4, 14


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a few, as the tiny engine takes."""
    monkeypatch.setattr(static_decoder, "_PIECE", 3)


@pytest.fixture(scope="module")
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        yield engine


def decoder_of(engine: Engine) -> StaticDecoder:
    manager, tensor_map = LoRAManager(), TensorMap()
    manager.initialize_engine_bindings(engine)
    manager.refresh_tensor_map(tensor_map)
    return StaticDecoder(engine, tensor_map, ROWS)


def by_token(decoder: StaticDecoder, ids: Ids) -> Logits:
    """Logits [rows, tokens, vocab], each token a run of its own."""
    return np.stack([decoder.decode(tokens).copy() for tokens in ids.T], axis=1)


@pytest.mark.parametrize("before", [0, BEFORE], ids=["new", "started"])
@pytest.mark.parametrize("seed", range(6))
def test_any_places_of_rows_of_any_length_have_the_logits_of_single_tokens(
    engine: Engine, before: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCABULARY, (ROWS, before + WIDTH))
    new = rng.integers(0, WIDTH + 1, ROWS)
    counted = np.flatnonzero((np.arange(WIDTH) < new[:, None]).ravel())
    kept = rng.permutation(counted)[: rng.integers(1, counted.size + 1)]
    expected = by_token(decoder_of(engine), ids)
    decoder = decoder_of(engine)
    if before:
        decoder.run(ids[:, :before])
    found = decoder.run(ids[:, before:], new=new, kept=kept)
    wanted = expected[:, before:].reshape(ROWS * WIDTH, -1)[kept]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert decoder.cache.lengths.tolist() == (before + new).tolist()
    for row, length in enumerate(before + new):  # and the cache goes on from there
        after = decoder.run(np.array([[5]]), first=row)
        alone = by_token(decoder_of(engine), np.append(ids[row, :length], 5)[None])
        np.testing.assert_allclose(after, alone[:, -1], atol=1e-5)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (1, 14), (3, 5), (4, 100)])
def test_pieces_are_every_token_once_and_those_of_a_row_in_order(
    shape: tuple[int, int], started: bool
) -> None:
    seen = np.zeros(shape, int)
    for rows, columns in _host_pieces(*shape, started=started):
        assert seen[rows, : columns.start].all()
        assert columns.stop - columns.start in range(2, 5)  # a single token has other kernels
        assert rows.stop - rows.start == 1 or not (started or columns.start)
        seen[rows, columns] += 1
    assert (seen == 1).all()


class Interrupted(SlotEngine):
    """Notes how many tokens of a row it runs; one run does not come to its end."""

    def __init__(self, interrupted: int | None) -> None:
        super().__init__(slots=3)
        self.widths: list[int] = []
        self._interrupted = interrupted

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        self.widths.append(tensor_map["input_ids"].shape[1])
        if len(self.widths) == self._interrupted:
            raise KeyboardInterrupt
        return super().execute(tensor_map)


@pytest.mark.parametrize("interrupted", [None, 1, 2, 6, 10])
def test_each_row_keeps_its_own_adapter_and_what_was_interrupted_begins_again(
    tmp_path: Path, interrupted: int | None
) -> None:
    engine, numbers = Interrupted(interrupted), {"a": 1, "b": 2, "c": 3}
    adapters = AdapterStore(engine)
    for name, number in numbers.items():
        adapters.load(name, number_file(tmp_path, number))
        adapters.bindings.activate(name)
    batch = scheduler_of(engine, adapters, max_num_batched_tokens=36)
    sampling = SamplingParams(max_tokens=6, temperature=0.9, seed=3, ignore_eos=True)
    prompts = {"c": list(range(4, 16)), "a": list(range(7, 17)), "b": list(range(5, 16))}
    rows = {batch.submit(prompt, sampling, adapter=name): name for name, prompt in prompts.items()}
    found: dict[int, list[int | None]] = {row: [] for row in rows}
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            step_of(batch)
    while batch:
        for token in step_of(batch):
            found[token.sequence_id].append(token.token_id)
    for row, name in rows.items():
        assert found[row] == expected_answer(prompts[name], numbers[name], sampling), name
    assert max(engine.widths) == 3
    assert engine.widths[9] > 1  # the last piece
