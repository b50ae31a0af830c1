"""Launches of a call in which every row may have an adapter of its own: a pass for each slot."""

from dataclasses import replace

from trt_lora.plugins.kernels.constants import PASS_BYTES, TILE_ROWS
from trt_lora.plugins.kernels.group_call import GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch, plan_launches
from trt_lora.plugins.kernels.nvrtc import SLOTS

_CTAS_AT_ONCE = 2  # on a multiprocessor


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
    return tuple(_with_passes(each, shape.m, most, chip) for each in launches)


def _with_passes(launch: Launch, m: int, most: int, chip: Chip) -> Launch:
    """The launch with up to `most` passes of a tile at once.

    All of them where there is one tile of rows. Where there are many, most have one slot, and a CTA
    without a pass would start in vain: then as many as fill the GPU. The clusters of `decode` share
    the passes out among themselves: as many as fill the GPU, and of a pass as many as without
    slots, which `splits` tells them.
    """
    width, height, _ = launch.grid
    room = _CTAS_AT_ONCE * chip.multiprocessors // height
    shared = launch.shared_bytes + PASS_BYTES
    kernel, grid, splits = SLOTS + launch.kernel, launch.grid, launch.splits
    if launch.kernel.startswith("decode"):
        splits = width // launch.cluster
        clusters = max(splits, min(splits * most, room // launch.cluster))
        grid = (clusters * launch.cluster, height, 1)
    else:
        passes = most if m <= TILE_ROWS else max(1, min(most, room // width))
        grid = (width, height, passes)
    return replace(launch, kernel=kernel, grid=grid, shared_bytes=shared, splits=splits)
