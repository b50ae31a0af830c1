"""LoRAManager through any life: what it binds, and the memory that it holds, are those of a model.

The law: every byte on the GPU lies in the zero buffer, in a loaded adapter, in one of the strengths
that are kept, in what is active, or in a map that was refreshed and still names it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.numpy import save_file
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import ALIGNMENT
from trt_lora.runtime.memory.tensor import TensorMap

MANIFEST = make_manifest()
SITES = [site.path for site in MANIFEST.sites[1:3]]
NAMES = st.sampled_from("ab")
SCALES = st.sampled_from([1, 0.5, 2.0, -1.0])  # of small integers, exactly
MAPS = st.integers(0, 1)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of the GPU that lives as long as anybody names it."""

    nbytes: int


class Bound(NamedTuple):
    """What a binding is expected to have, and where."""

    values: Array
    buffer: Buffer


Bindings = Mapping[str, Bound]


@dataclass
class Expected:
    """What a manager should know."""

    adapters: dict[str, Bindings] = field(default_factory=dict)
    raw: dict[str, dict[str, Array]] = field(default_factory=dict)  # without padding
    made_of: dict[str, set[str]] = field(default_factory=dict)  # of blends
    strengths: dict[tuple[str, float], Bindings] = field(default_factory=dict)
    active: tuple[str, float, Bindings] | None = None


class Life(RuleBasedStateMachine):
    """Any order of calls, bound to an engine at first or later."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.folder = pytest.MonkeyPatch(), tempfile.TemporaryDirectory()
        self.cuda = FakeCuda()
        self.cuda.install(self.patch)
        self.memory = CudaMemory(staging_bytes=1 << 12)
        self.manager, self.expected, self.bound = LoRAManager(), Expected(), False
        self.maps = [TensorMap(), TensorMap()]
        self.seen: list[Bindings] = [{}, {}]
        self.multiple, self.files = 1, 0

    @initialize(multiple=st.sampled_from([1, 8]), late=st.booleans())
    def begin(self, multiple: int, late: bool) -> None:
        self.multiple = multiple
        if not late:
            self.bind()

    @rule()
    def bind(self) -> None:
        executor = FakeExecutor(MANIFEST, self.memory)
        executor.rank_multiple = self.multiple
        if self.bound:
            with pytest.raises(StateError, match="has an engine already"):
                self.manager.initialize_engine_bindings(executor)
            return
        self.manager.initialize_engine_bindings(executor)
        self.bound, expected = True, self.expected
        expected.adapters = {name: self.placed(values) for name, values in expected.raw.items()}
        active, expected.active, expected.strengths = expected.active, None, {}
        if active:
            self.activate(active[0], active[1])

    @rule(
        name=NAMES,
        sites=st.sets(st.sampled_from(SITES), min_size=1),
        rank=st.integers(1, 9),
        seed=st.integers(0, 99),
        replace=st.booleans(),
    )
    def load(self, name: str, sites: set[str], rank: int, seed: int, replace: bool) -> None:
        rng = np.random.default_rng(seed)
        values = {
            binding: rng.integers(-3, 4, site.shape(factor, rank)).astype(np.float32)
            for binding, (site, factor) in MANIFEST.lora_bindings.items()
            if site.path in sites
        }
        self.files += 1
        path = Path(self.folder.name) / f"{self.files}.safetensors"
        save_file(values, path)
        if name in self.expected.adapters and not replace:
            with pytest.raises(AdapterError, match="is loaded already"):
                self.manager.load_weights(name, path)
            return
        self.manager.load_weights(name, path, replace=replace)
        self.register(name, values)

    @rule(name=NAMES, parts=st.dictionaries(NAMES, SCALES, min_size=1), replace=st.booleans())
    def blend(self, name: str, parts: dict[str, float], replace: bool) -> None:
        known = self.expected.raw
        values: dict[str, Array] = {}
        for part, scale in parts.items():
            for binding, array in known.get(part, {}).items():
                factor = MANIFEST.lora_bindings[binding][1]
                array = array if factor == "A" else array * np.float32(scale)
                before = [values[binding]] if binding in values else []
                values[binding] = np.concatenate([*before, array], 1 if factor == "A" else 0)
        too_wide = self.bound and any(min(array.shape) > 16 or max(array.shape) > 16
                                      for array in values.values())  # fmt: skip
        taken = name in known and not replace
        is_lost = self.bound and any(self.is_made_of(part, name) for part in parts)
        if taken or too_wide or is_lost or name in parts or not parts.keys() <= known.keys():
            with pytest.raises((AdapterError, UnknownAdapterError)):
                self.manager.blend(name, parts, replace=replace)
            return
        if any(max(array.shape) > 16 for array in values.values()):
            return  # before an engine is known; binding it would fail from then on
        self.manager.blend(name, parts, replace=replace)
        self.register(name, values)
        if self.bound:
            self.expected.made_of[name] = set(parts)

    def is_made_of(self, blend: str, name: str) -> bool:
        parts = self.expected.made_of.get(blend, set())
        return any(part == name or self.is_made_of(part, name) for part in parts)

    @rule(name=NAMES, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        expected = self.expected
        is_active = expected.active is not None and expected.active[0] == name
        if name not in expected.adapters or (is_active and not force):
            with pytest.raises((UnknownAdapterError, StateError)):
                self.manager.unload(name, force=force)
            return
        self.manager.unload(name, force=force)
        self.forget(name)
        expected.active = None if is_active else expected.active

    @rule(name=NAMES, scale=SCALES)
    def switch(self, name: str, scale: float) -> None:
        if name not in self.expected.adapters:
            with pytest.raises(UnknownAdapterError):
                self.manager.switch_weights(name, scale)
            return
        self.manager.switch_weights(name, scale)
        self.activate(name, scale)

    @rule()
    def reset(self) -> None:
        self.manager.reset_weights()
        self.expected.active = None

    @rule(index=MAPS)
    def refresh(self, index: int) -> None:
        if not self.bound:
            with pytest.raises(StateError, match="no engine is bound"):
                self.manager.refresh_tensor_map(self.maps[index])
            return
        self.manager.refresh_tensor_map(self.maps[index])
        self.seen[index] = self.expected.active[2] if self.expected.active else {}

    @rule(index=MAPS)
    def drop_a_map(self, index: int) -> None:
        self.maps[index], self.seen[index] = TensorMap(), {}

    @invariant()
    def the_manager_says_what_the_model_says(self) -> None:
        active = self.expected.active or ("", 1.0, {})
        assert self.manager.get_adapter_names() == list(self.expected.adapters)
        assert (self.manager.get_active_adapter_name(), self.manager.active_scale) == active[:2]
        for binding in MANIFEST.lora_bindings:
            assert self.manager.has_weight_for(binding) == (binding in active[2])

    @invariant()
    def every_map_has_what_it_was_last_given(self) -> None:
        for tensor_map, seen in zip(self.maps, self.seen, strict=True):
            for binding, tensor in tensor_map.items():
                site, factor = MANIFEST.lora_bindings[binding]
                dummy = Bound(np.zeros(site.shape(factor, 1), np.float32), Buffer(0))
                np.testing.assert_array_equal(tensor.numpy(), seen.get(binding, dummy).values)

    @invariant()
    def memory_is_conserved(self) -> None:
        expected = self.expected
        bindings = [*expected.adapters.values(), *expected.strengths.values(), *self.seen]
        bindings += [expected.active[2]] if expected.active else []
        buffers = {bound.buffer for each in bindings for bound in each.values()}
        zeros = max(size * 4 for site in MANIFEST.sites for size in (site.k, site.n))
        zeros = max(zeros, ALIGNMENT) if self.bound or any(self.maps) else 0
        assert self.cuda.live_device_bytes() == zeros + sum(b.nbytes for b in buffers)
        for name in expected.adapters if self.bound else ():
            coverage = self.manager.get_coverage(name)
            sizes = [bound.values.nbytes for bound in expected.adapters[name].values()]
            assert coverage is not None
            assert coverage.nbytes == sum(sizes)

    def teardown(self) -> None:
        """With the manager and the maps, everything goes."""
        self.manager = LoRAManager()
        self.maps.clear()
        self.memory.close()
        self.cuda.check()
        self.patch.undo()
        self.folder.cleanup()

    # ------------------------------------------------------------------------------- the model

    def placed(self, values: Mapping[str, Array]) -> Bindings:
        """As an engine holds an adapter: ranks padded, everything in one buffer."""
        if not self.bound:
            return {binding: Bound(array, Buffer(0)) for binding, array in values.items()}
        padded: dict[str, Array] = {}
        for binding, array in values.items():
            axis = 1 if MANIFEST.lora_bindings[binding][1] == "A" else 0
            rank = min(-(-array.shape[axis] // self.multiple) * self.multiple, 16)
            width = [(0, 0), (0, 0)]
            width[axis] = (0, rank - array.shape[axis])
            padded[binding] = np.pad(array, width)
        buffer = Buffer(sum(aligned(array) for array in padded.values()))
        return {binding: Bound(array, buffer) for binding, array in padded.items()}

    def register(self, name: str, values: dict[str, Array]) -> None:
        expected, order = self.expected, list(self.expected.adapters)
        if name in order:
            self.forget(name)
        expected.raw[name], expected.adapters[name] = values, self.placed(values)
        if name in order:  # in the place of the one before
            names = [n for n in order if n in expected.adapters]
            expected.adapters = {n: expected.adapters[n] for n in names}
            expected.raw = {n: expected.raw[n] for n in names}
        if expected.active and expected.active[0] == name:
            self.activate(name, expected.active[1])

    def activate(self, name: str, scale: float) -> None:
        expected, bindings = self.expected, self.expected.adapters[name]
        if scale == 1:
            expected.active = name, 1.0, bindings
            return
        if (name, scale) not in expected.strengths:
            values = {
                binding: array * np.float32(scale if self.is_b(binding) else 1)
                for binding, array in expected.raw[name].items()
            }
            expected.strengths[name, scale] = self.placed(values)
        expected.active = name, scale, expected.strengths[name, scale]

    def is_b(self, binding: str) -> bool:
        return MANIFEST.lora_bindings[binding][1] == "B"

    def forget(self, name: str) -> None:
        """With an adapter its strengths go, and the blends that it is a part of."""
        expected = self.expected
        del expected.adapters[name], expected.raw[name]
        expected.made_of.pop(name, None)
        expected.strengths = {key: b for key, b in expected.strengths.items() if key[0] != name}
        for blend, parts in list(expected.made_of.items()):
            if name in parts and blend in expected.adapters:
                self.forget(blend)


def aligned(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
