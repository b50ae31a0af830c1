"""Launches of a call in which every row may have an adapter of its own: a pass for each slot."""

from dataclasses import replace

from trt_lora.plugins.kernels.constants import PASS_BYTES, TILE_ROWS
from trt_lora.plugins.kernels.group_call import GroupShape
from trt_lora.plugins.kernels.launch_plan import TILE_CTAS, Chip, Launch, plan_launches
from trt_lora.plugins.kernels.nvrtc import SLOTS


def launches_of(shape: GroupShape, chip: Chip, *, aligned: bool = True) -> tuple[Launch, ...]:
    """Return the launches of one call, in order.

    With stacks they are those of one adapter of the stacks' ranks; the host does not know which
    slots the rows take, so the kernels find their passes themselves.

    Args:
        shape: of the call.
        chip: the GPU.
        aligned: whether all addresses are multiples of VECTOR_BYTES.

    Raises:
        ConfigError: the group has no site or too many, the dtype is unknown, or the GPU too old.
        TensorError: a dimension is 0, or a rank is out of range.
    """
    launches = plan_launches(shape, chip, aligned=aligned)
    if shape.stacks is None:
        return launches
    most = min(TILE_ROWS, shape.m, shape.stacks.slots + 1)  # the base model's rows are one too
    return tuple(_with_passes(each, most, chip) for each in launches)


def _with_passes(launch: Launch, most: int, chip: Chip) -> Launch:
    """The launch with up to `most` passes of a tile at once, as many as fill the GPU.

    More CTAs would wait for those, or start in vain where rows share a slot. The clusters of
    `decode` share the passes out among themselves: of a pass there are as many as without slots at
    most, which `splits` tells them.
    """
    width, height, _ = launch.grid
    room = TILE_CTAS * chip.multiprocessors // height
    shared = launch.shared_bytes + PASS_BYTES
    kernel, splits = SLOTS + launch.kernel, launch.splits
    grid = (width, height, max(1, min(most, -(-room // width))))
    if launch.kernel.startswith("decode"):
        splits = width // launch.cluster
        clusters = max(splits, min(splits * most, room // launch.cluster))
        grid = (clusters * launch.cluster, height, 1)
    return replace(launch, kernel=kernel, grid=grid, shared_bytes=shared, splits=splits)
