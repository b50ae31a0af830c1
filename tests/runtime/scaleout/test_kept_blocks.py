"""Blocks that an engine keeps, as a router is told of them."""

from trt_lora.runtime.scaleout.kept_blocks import KeptBlocks, KeptPrefix

TOKENS = tuple(range(10))


def test_whole_blocks_are_told_once_and_removed_when_no_row_has_them() -> None:
    blocks = KeptBlocks(4)
    long, short = KeptPrefix(TOKENS, "a", None), KeptPrefix(TOKENS[:5], "a", None)
    (stored,) = blocks.changes([long])
    numbers = stored["block_hashes"]
    assert stored == {
        "type": "stored",
        "token_ids": list(TOKENS[:8]),
        "num_block_tokens": [4, 4],
        "block_hashes": numbers,
        "lora_name": "a",
        "cache_salt": None,
    }
    assert blocks.changes([long]) == []
    assert blocks.changes([long, short, short]) == []  # its block is known
    assert blocks.changes([short]) == [{"type": "removed", "block_hashes": numbers[1:]}]
    assert blocks.changes([]) == [{"type": "removed", "block_hashes": numbers[:1]}]


def test_a_block_has_the_number_of_all_that_leads_to_it() -> None:
    prefixes = [
        KeptPrefix(TOKENS, adapter, salt) for adapter in (None, "a") for salt in (None, "s")
    ]
    prefixes += [KeptPrefix((9, *TOKENS), "a", None), KeptPrefix(TOKENS[4:], "a", None)]
    numbers = [number for prefix in prefixes for number in prefix.blocks(4)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert KeptPrefix(TOKENS[:7], None, None).blocks(4) == prefixes[0].blocks(4)[:1]
