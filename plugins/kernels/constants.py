"""Tile and block sizes shared by the CUDA kernels and the launch planner."""

from trt_lora.plugins.contract.sites import MAX_SITES

THREADS = 256  # of every CTA
CLUSTER = 8  # CTAs that share a shrink: the most that every GPU with clusters can place
VECTOR_BYTES = 16  # of a row of A or B: one load
COLUMN_TILE_VECTORS = 16  # of A, that a CTA shrinks at once
PAD = 8  # elements behind each row in shared memory, so that a column's lie in different banks

# On tensor cores.
TILE_ROWS = 64  # of a CTA
TILE_COLUMNS = 128  # of A in shrink_tiles, of B in expand_tiles: 16 vectors of 16-bit elements
MMA_ROWS = 16  # of x that an mma multiplies at once: all that a CTA of fused_tiles has
K_STEP = 32  # of k, that a warp multiplies at once
STAGES = 3  # steps of the pipeline from global memory
RANK_BLOCK = 64  # of t and B, that expand_tiles multiplies at once; a smaller rank is one block

# On tensor cores, for the few rows of a decode step.
ROW_TILE = 8  # rows of x that an mma multiplies at once
DECODE_TILES = (1, 2, 4)  # row tiles of a CTA: each has a kernel
SLOT_DECODE_TILES = (1, 2)  # the same with slots, whose passes leave less room in registers
RANK_TILE = 16  # ranks of a site that an mma multiplies at once: of each, a warp has one
CHUNK = 32  # of k, that a warp loads at once
CHUNKS = 4  # of a warp, that are under way at once
UNIT = 64  # columns of B that a warp multiplies at once

# Where every row has an adapter of its own.
PASS_BYTES = 528  # of shared memory: `Group` of cuda_cores.cu, in whole vectors


def constant_declarations(*, has_slots: bool = False) -> str:
    """Return the constants in C++, to stand before the kernels' source.

    Args:
        has_slots: of kernels for rows with adapters of their own.
    """
    constants = {
        "THREADS": THREADS,
        "CLUSTER": CLUSTER,
        "VECTOR_BYTES": VECTOR_BYTES,
        "COLUMN_TILE_VECTORS": COLUMN_TILE_VECTORS,
        "PAD": PAD,
        "TILE_ROWS": TILE_ROWS,
        "TILE_COLUMNS": TILE_COLUMNS,
        "MMA_ROWS": MMA_ROWS,
        "K_STEP": K_STEP,
        "STAGES": STAGES,
        "RANK_BLOCK": RANK_BLOCK,
        "ROW_TILE": ROW_TILE,
        "RANK_TILE": RANK_TILE,
        "CHUNK": CHUNK,
        "CHUNKS": CHUNKS,
        "UNIT": UNIT,
        "MAX_SITES": MAX_SITES,
        "PASS_BYTES": PASS_BYTES,
    }
    mode = f"constexpr bool HAS_SLOTS = {str(has_slots).lower()};\n"
    return mode + "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
