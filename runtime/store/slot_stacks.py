"""Stacks of an engine for many adapters: memory on its device for good, an adapter in each slot."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from trt_lora.plugins.contract.sites import VECTORS, Factor, dummy_value
from trt_lora.plugins.contract.slots import LORA_RANK, SLOT_DTYPE
from trt_lora.plugins.errors import AdapterError, ConfigError, StateError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import Blocks, Memory, pack, packed_on_host
from trt_lora.runtime.memory.tensor import (
    HOST,
    Tensor,
    TensorMap,
    tensor_from_numpy,
    tensor_from_storage,
)

_CACHED_VIEWS = 64  # first slot and number of slots, the pairs in use


class SlotStacks:
    """A [slots, k, R] and B [slots, R, n] of every site, and the ranks [slots, sites].

    An engine with vectors has those too [slots + 1, n], the last row for the base model.

    Addresses and shapes never change. A slot holds one adapter, with zeros behind its ranks; it is
    copied there, and no run may read the slot meanwhile.
    """

    def __init__(self, manifest: Manifest, memory: Memory, slots: int | None = None) -> None:
        """Allocate empty slots on the engine's device.

        Args:
            manifest: of the engine.
            memory: of the engine.
            slots: from 1 to as many as the engine was built for, which is the default.

        Raises:
            ConfigError: the engine takes one adapter at a time.
            BackendError: the device is out of memory.
        """
        self._manifest, self._memory = manifest, memory
        self._slot = slot_tensors(manifest)
        self.slots = manifest.max_loras if slots is None else slots
        self._vectors = _vectors(manifest)
        # The stacks that hold ones where there is no adapter.
        self._scales = {name for name, factor in self._vectors.items() if dummy_value(factor)}
        self.nbytes, layout = pack(_stacked(manifest, self.slots), memory.device)
        block = memory.zeros(self.nbytes)
        self._stacks = {
            name: replace(place, pointer=block.pointer + place.pointer, owner=block)
            for name, place in layout.items()
        }
        self._written = defaultdict[int, list[tuple[str, tuple[int | slice, ...]]]](list)
        self._views: dict[tuple[int, int], TensorMap] = {}
        for slot in range(self.slots + 1):  # the base model's too
            self._write_ones(slot)

    def place(self, slot: int, fitted: Fitted) -> None:
        """Copy an adapter into a slot, in the place of what was there.

        Args:
            slot: from 0.
            fitted: to this engine; sites that it leaves out get zeros.

        Raises:
            StateError: there is no such slot.
            AdapterError: a tensor does not fit its site's stacks.
        """
        self._check_slot(slot)
        if self._memory.device == HOST:
            self._place_on_host(slot, fitted)
            return
        padded = self._padded(fitted)
        self._memory.write({self._pointer(name, slot): tensor for name, tensor in padded.items()})

    def rewrite(self, slot: int, factors: Mapping[str, Array]) -> None:
        """Write other values over every B of the adapter in a slot.

        Args:
            slot: where it is.
            factors: B [r, n], or [E, r, n] of experts, by the path of its site; on the host.
        """
        targets: dict[int, Tensor] = {}
        for path, b in factors.items():
            name = self._manifest.binding_names.binding("B", path)
            if self._memory.device == HOST:
                self._stacks[name].storage()[slot, ..., : b.shape[-2], :] = b
                continue
            start, place = self._pointer(name, slot), self._slot[name]
            experts = b.reshape(-1, *b.shape[-2:])  # of which each has zeros behind its rank
            for at, one in enumerate(experts):
                target = start + at * (place.nbytes // len(experts))
                targets[target] = tensor_from_storage(one, place.dtype)
        self._memory.write(targets)

    def clear(self, slot: int) -> None:
        """Write zeros to a slot.

        Raises:
            StateError: there is no such slot.
        """
        self._check_slot(slot)
        if self._memory.device == HOST:
            self._clear_on_host(slot)
            return
        for name, tensor in self._slot.items():
            if name not in self._scales:
                self._memory.clear(self._pointer(name, slot), Blocks(tensor.nbytes))
        self._write_ones(slot)

    def views(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Every stack over slots [first, first + count); the same objects at every call.

        A step whose rows take these slots alone then computes no others; it counts its slots from
        `first`.

        Raises:
            StateError: there are no such slots.
        """
        if first < 0 or count < 1 or first + count > self.slots:
            raise StateError(f"no {count} slots from {first}; this engine has {self.slots}")
        if (first, count) not in self._views:
            if len(self._views) == _CACHED_VIEWS:
                del self._views[next(iter(self._views))]
            self._views[first, count] = self._new_views(first, count)
        return self._views[first, count]

    def _new_views(self, first: int, count: int) -> TensorMap:
        return TensorMap(
            (name, replace(s, pointer=self._pointer(name, first), shape=(rows, *s.shape[1:])))
            for name, s in self._stacks.items()
            # To the base model's row, behind all slots: their size costs a step nothing.
            for rows in (s.shape[0] - first if name in self._vectors else count,)
        )

    def _padded(self, fitted: Fitted) -> dict[str, Tensor]:
        """All that a slot holds, on the host."""
        padded = self._empty(self._slot)
        for name, tensor in self._checked(fitted).items():
            padded[name].storage()[tuple(map(slice, tensor.shape))] = tensor.read_storage()
        return padded

    def _place_on_host(self, slot: int, fitted: Fitted) -> None:
        """Write no more than the ranks of the adapter, and of the one before it."""
        tensors = self._checked(fitted)
        self._clear_on_host(slot)
        for name, tensor in tensors.items():
            within: tuple[int | slice, ...] = (slot, *(slice(size) for size in tensor.shape))
            self._stacks[name].storage()[within] = tensor.read_storage()
            self._written[slot].append((name, within))

    def _clear_on_host(self, slot: int) -> None:
        for name, within in self._written.pop(slot, []):
            self._stacks[name].storage()[within] = name in self._scales

    def _checked(self, fitted: Fitted) -> dict[str, Tensor]:
        """What goes into a slot of an adapter that fits it, with its ranks."""
        for name, tensor in fitted.tensors.items():
            room = self._slot[name].shape if name in self._slot else ()
            if len(room) != len(tensor.shape) or any(map(int.__gt__, tensor.shape, room)):
                raise AdapterError(
                    f"{fitted.coverage.source}: {name} has shape {list(tensor.shape)}, a slot of "
                    f"this engine has room for {list(room)}; fit the adapter to this engine"
                )
        ranks = np.array([site.rank for site in fitted.coverage.sites], SLOT_DTYPE)
        return {**fitted.tensors, LORA_RANK: tensor_from_numpy(ranks)}

    def _empty(self, names: Collection[str]) -> dict[str, Tensor]:
        """What a slot holds of these without an adapter, on the host."""
        empty = packed_on_host({name: self._slot[name] for name in names})
        for name in self._scales.intersection(names):
            empty[name].storage()[:] = 1
        return empty

    def _write_ones(self, slot: int) -> None:
        """Make a slot's scales those of the base model, where there are any."""
        if self._scales:
            ones = self._empty(self._scales).items()
            self._memory.write({self._pointer(name, slot): tensor for name, tensor in ones})

    def _pointer(self, name: str, slot: int) -> int:
        return self._stacks[name].pointer + slot * self._slot[name].nbytes

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise StateError(f"there is no slot {slot}; this engine has 0 to {self.slots - 1}")


def slot_tensors(manifest: Manifest) -> dict[str, Tensor]:
    """Return what one slot holds, as tensors without memory: A [k, R], B [R, n], ranks [sites].

    Raises:
        ConfigError: the engine takes one adapter at a time.
    """
    if not manifest.max_loras:
        raise ConfigError(
            f"this engine of {manifest.base_model.name} takes one adapter at a time: it has no "
            "slots; build one with --max-loras 8"
        )
    rank = manifest.max_lora_rank
    tensors = {
        name: Tensor(0, site.shape(factor, rank), site.dtype)
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    return {**tensors, LORA_RANK: Tensor(0, (len(manifest.sites),), SLOT_DTYPE)}


def slot_nbytes(manifest: Manifest) -> int:
    """Return the bytes of one slot.

    Raises:
        ConfigError: the engine takes one adapter at a time.
    """
    return pack(slot_tensors(manifest), "")[0]


def stacks_nbytes(manifest: Manifest) -> int:
    """Return the bytes that the stacks of an engine take on its device, before they are made.

    Raises:
        ConfigError: the engine takes one adapter at a time.
    """
    return pack(_stacked(manifest, manifest.max_loras), "")[0]


def _vectors(manifest: Manifest) -> dict[str, Factor]:
    """What each vector of a site is, by its name."""
    bindings = manifest.lora_bindings.items()
    return {name: factor for name, (_, factor) in bindings if factor in VECTORS}


def _stacked(manifest: Manifest, slots: int) -> dict[str, Tensor]:
    vectors = _vectors(manifest)
    return {
        name: replace(t, shape=(slots + (name in vectors), *t.shape))
        for name, t in slot_tensors(manifest).items()
    }
