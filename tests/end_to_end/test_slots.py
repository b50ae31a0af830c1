"""Many adapters in one batch, end to end: every row answers as PEFT does with its adapter alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.slot_rows import Ids, Logits, SlotRows
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.verification.peft_reference import PeftReference

STEPS, SLOTS, TOLERANCE = 16, 5, 1e-4
RANKS = {"a": 1, "b": 3, "c": 4, "d": 8, "e": 11}
# Rows by name: adapter (None is the base model) and length of the prompt.
ROWS: dict[str, tuple[str | None, int]] = {
    "r0": ("a", 5),
    "r1": (None, 9),
    "r2": ("c", 2),
    "r3": ("b", 12),
    "r4": ("c", 7),
    "r5": ("e", 1),
    "r6": (None, 6),
    "r7": ("d", 8),
}

pytestmark = pytest.mark.slow


def row_ids(row: str, seed: int = 0) -> Ids:
    """The prompt of a row and the tokens that follow it."""
    rng = np.random.default_rng([seed, int(row[1:])])
    return rng.integers(3, VOCABULARY, ROWS[row][1] + STEPS)


@dataclass(frozen=True)
class Built:
    """An engine for many adapters, the same engine without LoRA, and what PEFT needs."""

    model: Path
    adapters: dict[str, Path]
    engine: Engine
    base: Engine

    def slot_adapters(self) -> AdapterStore:
        """All five adapters, in host memory."""
        adapters = AdapterStore(self.engine)
        for name, path in self.adapters.items():
            adapters.load(name, path)
        return adapters


def build(architecture: str, folder: Path, stack: ExitStack) -> Built:
    model = save_model(architecture, folder / "model")
    adapters = {
        name: save_adapter(model, folder / name, seed=rank, r=rank, lora_alpha=2 * rank)
        for name, rank in RANKS.items()
    }
    config = tiny_config(
        model, folder / "engine", max_loras=SLOTS, max_lora_rank=11, max_batch_size=len(ROWS)
    )
    quick_build(config)
    (folder / "base").mkdir()
    base = engine_without_lora(folder / "engine", folder / "base")
    engines = [stack.enter_context(open_engine(path)) for path in (folder / "engine", base)]
    return Built(model, adapters, *engines)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    with ExitStack() as stack:
        yield build("Llama", tmp_path_factory.mktemp("llama"), stack)


def run_rows(rows: SlotRows, adapter_of: dict[str, str | None], seed: int = 0) -> dict[str, Logits]:
    """Logits [tokens, vocab] of every row; they join at different steps and leave when done."""
    ids = {row: row_ids(row, seed) for row in ROWS}
    found: dict[str, list[Logits]] = {}
    waiting, left = list(ROWS), dict.fromkeys(ROWS, STEPS)
    while waiting or found.keys() & left.keys():
        for row in waiting[:3]:  # the last ones join while the first decode
            found[row] = [rows.join(row, adapter_of[row], ids[row][:-STEPS])]
        waiting = waiting[3:]
        running = [row for row in found if row in left]
        logits = rows.step({row: int(ids[row][-left[row]]) for row in running})
        for row in running:
            found[row].append(logits[row].copy())
            left[row] -= 1
            if not left[row]:
                del left[row]
                rows.leave(row)
    return {row: np.concatenate(parts) for row, parts in found.items()}


OWN = {row: adapter for row, (adapter, _) in ROWS.items()}
BASE_ROWS = [row for row, adapter in OWN.items() if adapter is None]


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Phi3", "Gemma2"])
def test_every_row_answers_as_peft_does_with_its_adapter_alone(
    architecture: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        built = build(architecture, tmp_path, stack)
        ours = run_rows(SlotRows(built.engine, built.slot_adapters()), OWN)
        plain = run_rows(SlotRows(built.base, None), OWN)
    reference = PeftReference(built.model, built.adapters)
    for row, adapter in OWN.items():
        ids = row_ids(row)[None]
        theirs = reference.logits(adapter or "", ids, np.ones_like(ids))[0]
        assert np.abs(ours[row] - theirs).max() < TOLERANCE, row
        if adapter is None:
            assert np.array_equal(ours[row], plain[row])
        else:
            assert np.abs(ours[row] - plain[row]).max() > 100 * TOLERANCE


def test_no_bit_of_a_row_depends_on_what_its_neighbours_are(llama: Built) -> None:
    ours = run_rows(SlotRows(llama.engine, llama.slot_adapters()), OWN)
    others = OWN | {"r0": "e", "r3": "a", "r5": None}
    again = run_rows(SlotRows(llama.engine, llama.slot_adapters()), others)
    same = [row for row in ROWS if OWN[row] == others[row]]
    assert len(same) == 5
    for row in ROWS:
        assert np.array_equal(ours[row], again[row]) == (row in same), row


def test_a_manager_gives_all_rows_its_active_adapter(llama: Built) -> None:
    manager = LoRAManager()
    manager.initialize_engine_bindings(llama.engine)
    for name, path in llama.adapters.items():
        manager.load_weights(name, path)
    reference = PeftReference(llama.model, llama.adapters)
    for name in ["", "a", "e", "", "a"]:
        ours = engine_logits(llama.engine, manager, name)
        assert largest_error(ours, reference.logits(name, *batch())) < TOLERANCE
    manager.switch_weights("a", 0.0)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    assert tensor_map["lora_slot"].numpy().tolist() == [0]


def test_a_slot_answers_with_what_was_placed_last(llama: Built) -> None:
    adapters = AdapterStore(llama.engine)
    adapters.load("d", llama.adapters["d"])
    ids = row_ids("r1")
    right = SlotRows(llama.engine, adapters).join("r1", "d", ids)
    adapters.unload("d")
    adapters.load("a", llama.adapters["a"])
    other = SlotRows(llama.engine, adapters).join("r1", "a", ids)
    adapters.unload("a")
    adapters.load("again", llama.adapters["d"])
    again = SlotRows(llama.engine, adapters).join("r1", "again", ids)
    assert adapters.bindings.slots == {"again": 0}
    assert np.array_equal(again, right)
    assert not np.array_equal(other, right)


def test_half_precision_stays_close_to_peft(llama: Built, tmp_path: Path) -> None:
    quick_build(tiny_config(llama.model, tmp_path / "e", dtype="float16", max_loras=2))
    rows = {"r1": "d", "r3": None}
    reference = PeftReference(llama.model, llama.adapters)
    with open_engine(tmp_path / "e") as engine:
        adapters = AdapterStore(engine)
        adapters.load("d", llama.adapters["d"])
        running = SlotRows(engine, adapters)
        for row, name in rows.items():
            ids = row_ids(row)
            ours = running.join(row, name, ids)
            theirs = reference.logits(name or "", ids[None], np.ones_like(ids[None]))[0]
            assert 0 < np.abs(ours - theirs).max() < 0.03
