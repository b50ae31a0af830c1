"""vLLM's `LoRAMapping`: the adapter of every row of a batch, by number."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.checked import check_items, checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr

_BASE = 0  # the index of rows without an adapter


@short_repr
@dataclass(frozen=True)
class LoRAMapping:
    """Indices are the mapping's own, from 1, and 0 is the base model; slots are the adapters'."""

    index_mapping: tuple[int, ...]  # the index of every row
    lora_index_mapping: dict[int, int]  # LoRA id -> index
    is_prefill: bool = False

    def __post_init__(self) -> None:
        """Check that every index is one.

        Raises:
            ConfigError: (a ValueError) a row has an index that no adapter has, or an id is below 1.
        """
        if wrong := [lora_id for lora_id in self.lora_index_mapping if lora_id <= 0]:
            raise ConfigError(f"Invalid LoRA ID: {wrong[0]}; ids are whole numbers from 1")
        indices = list(self.lora_index_mapping.values())
        if len(set(indices)) < len(indices) or _BASE in indices:
            raise ConfigError(
                f"indices {indices}: each adapter has its own, and 0 is the base model"
            )
        if wrong := [index for index in self.index_mapping if index not in (_BASE, *indices)]:
            raise ConfigError(f"Invalid index mapping: {wrong[0]}; indices are 0 and {indices}")

    @classmethod
    @checked
    def map_sequence_to_adapters(
        cls, lora_ids: Iterable[int | None], *, is_prefill: bool = False
    ) -> "LoRAMapping":
        """Return the mapping of rows by their LoRA ids; None and 0 are the base model.

        Raises:
            ConfigError: an id is below 0.
        """
        ids = [lora_id or 0 for lora_id in lora_ids]
        check_items("lora_ids", ids, int)
        indices = {id_: i for i, id_ in enumerate(dict.fromkeys(filter(None, ids)), start=1)}
        return cls(tuple(indices.get(id_, _BASE) for id_ in ids), indices, is_prefill)

    @property
    def prompt_mapping(self) -> tuple[int, ...]:
        """The number of every row: a row is a prompt."""
        return tuple(range(len(self.index_mapping)))

    @property
    def max_lora_id(self) -> int:
        """The largest id; 0 if there is none."""
        return max(self.lora_index_mapping, default=0)

    @property
    def lora_set(self) -> dict[int, set[int]]:
        """The rows of every id."""
        return {
            lora_id: {row for row, of_row in enumerate(self.index_mapping) if of_row == index}
            for lora_id, index in self.lora_index_mapping.items()
        }

    @checked
    def get_lora_id_for_index(self, index: int) -> int | None:
        """Return the id of a row; None for the base model, or where there is no such row."""
        ids = self.lora_ids
        return ids[index] if 0 <= index < len(ids) else None

    @checked
    def create_batch_indices(self, batch_size: int) -> npt.NDArray[np.int32]:
        """Return the index of the first rows, [batch_size]; rows beyond the last have 0."""
        rows: Sequence[int] = self.index_mapping[:batch_size]
        return np.array([*rows, *[_BASE] * (batch_size - len(rows))], np.int32)

    @property
    def lora_ids(self) -> tuple[int | None, ...]:
        """The id of every row; None is the base model."""
        ids = {index: lora_id for lora_id, index in self.lora_index_mapping.items()}
        return tuple(ids.get(index) for index in self.index_mapping)
