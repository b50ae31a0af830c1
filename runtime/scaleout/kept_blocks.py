"""KeptBlocks: the blocks of tokens whose keys and values an engine keeps, told by what changes."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True)
class KeptPrefix:
    """Tokens that a row keeps of an answer that has ended."""

    tokens: tuple[int, ...]
    adapter: str | None  # None: the base model
    salt: str | None

    def blocks(self, size: int) -> tuple[int, ...]:
        """Return a number of 63 bits for each whole block, of all that leads to it."""
        whole = len(self.tokens) // size
        state = blake2b(repr((self.adapter, self.salt)).encode(), digest_size=8)
        numbers = []
        for block in range(whole):
            state.update(repr(self.tokens[block * size : (block + 1) * size]).encode())
            numbers.append(int.from_bytes(state.digest()) >> 1)
        return tuple(numbers)


class KeptBlocks:
    """Tells a router, which looks for the engine that has most of a prompt, of blocks."""

    def __init__(self, size: int) -> None:
        """Begin with none.

        Args:
            size: tokens of a block.
        """
        self._size = size
        self._kept: dict[KeptPrefix, tuple[int, ...]] = {}
        self._rows = Counter[int]()  # that have each block

    def changes(self, now: Collection[KeptPrefix]) -> list[dict[str, Any]]:
        """Return Dynamo's events for what is kept now and was not, and the other way round."""
        new = [prefix for prefix in dict.fromkeys(now) if prefix not in self._kept]
        gone = [self._kept.pop(prefix) for prefix in self._kept.keys() - set(now)]
        events = [event for prefix in new if (event := self._stored(prefix)) is not None]
        for blocks in gone:
            self._rows.subtract(blocks)
        lost = [block for block, rows in self._rows.items() if not rows]
        for block in lost:
            del self._rows[block]
        return [*events, {"type": "removed", "block_hashes": lost}] if lost else events

    def _stored(self, prefix: KeptPrefix) -> dict[str, Any] | None:
        blocks = self._kept[prefix] = prefix.blocks(self._size)
        is_known = all(map(self._rows.__contains__, blocks))
        self._rows.update(blocks)
        if is_known:
            return None
        return {
            "type": "stored",
            "token_ids": list(prefix.tokens[: len(blocks) * self._size]),
            "num_block_tokens": [self._size] * len(blocks),
            "block_hashes": list(blocks),
            "lora_name": prefix.adapter,
            "cache_salt": prefix.salt,
        }
