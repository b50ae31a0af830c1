"""Launch the LoRA kernels through the CUDA driver API."""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trt_lora.plugins.contract.sites import MAX_SITES
from trt_lora.plugins.cuda_bindings import bindings, checked, checked_function
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.constants import VECTOR_BYTES
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch, column_tiles
from trt_lora.plugins.kernels.nvrtc import architecture_of, compile_lora, kernels_of
from trt_lora.plugins.kernels.passes import launches_of


class KernelSite(ctypes.Structure):
    """`Site` of cuda_cores.cu."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("column", ctypes.c_int),
        ("rank_tile", ctypes.c_int),
        ("of_ranks", ctypes.c_int),
        ("stride", ctypes.c_int),
    )


class KernelStacks(ctypes.Structure):
    """`Stacks` of cuda_cores.cu."""

    _fields_ = (
        ("slot", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("slots", ctypes.c_int),
        ("sites", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
    )


class KernelGroup(ctypes.Structure):
    """`Group` of cuda_cores.cu: the one argument of every kernel."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
        ("sites", ctypes.c_int),
        ("total_rank", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("rank_tiles", ctypes.c_int),
        ("site", KernelSite * MAX_SITES),
        ("stacks", KernelStacks),
        ("taken", ctypes.c_ulonglong),
    )


# Several addresses in one call, which takes half as long as a field of ctypes each.
_OF_GROUP = struct.Struct("2P")  # x and workspace
_OF_SITE = struct.Struct("4P")  # a, b, y and out


def group_of(shape: GroupShape, buffers: GroupBuffers, splits: int) -> KernelGroup:
    """Return the kernels' argument.

    Raises:
        TensorError: the buffers are not one A, B, output and, with an addend, y for each site.
    """
    argument = PackedArgument(shape, splits)
    argument.point_to(buffers)
    return argument.group


class PackedArgument:
    """The kernels' argument for one shape, where only addresses are written anew."""

    def __init__(self, shape: GroupShape, splits: int) -> None:
        sites, total_rank = len(shape.sites), shape.total_rank
        tiles = sum(site.rank_tiles for site in shape.sites)
        self.group = KernelGroup(None, None, shape.m, shape.k, sites, total_rank, splits, tiles)
        self._sites = tuple(self.group.site[site] for site in range(sites))  # views of the group
        self._no_y = () if shape.has_addend else (0,) * sites
        self._bytes = (ctypes.c_char * ctypes.sizeof(self.group)).from_buffer(self.group)
        first, size = KernelGroup.site.offset, ctypes.sizeof(KernelSite)
        self._offsets = tuple(range(first, first + sites * size, size))
        column = tile = 0
        for site, sizes in zip(self._sites, shape.sites, strict=True):
            site.n, site.rank, site.column, site.rank_tile = sizes.n, sizes.rank, column, tile
            column += sizes.rank
            tile += sizes.rank_tiles
        self._stacks = self._described(shape, shape.stacks) if shape.stacks else None

    def _described(self, shape: GroupShape, stacks: StackShape) -> KernelStacks:
        for site, column in zip(self._sites, stacks.columns, strict=True):
            site.of_ranks = column
        found: KernelStacks = self.group.stacks
        found.slots, found.sites, found.columns = stacks.slots, stacks.sites, shape.total_rank
        found.column_tiles = column_tiles(shape)
        return found

    def point_to(self, buffers: GroupBuffers) -> int:
        """Write the addresses of a call; return all their bits, which tell how they are aligned.

        Raises:
            TensorError: they are not one A, B, output and, with an addend, y for each site; or,
                with stacks, those of slot and rank are missing.
        """
        x, every_a, every_b, every_y, every_out, workspace, slot, rank = buffers
        _OF_GROUP.pack_into(self._bytes, 0, x, workspace)
        if self._stacks is not None:
            if not (slot and rank):
                raise TensorError(f"the rows' slots are at {slot:#x}, their ranks at {rank:#x}")
            self._stacks.slot, self._stacks.rank = slot, rank
        bits = x
        if self._no_y and every_y:
            raise self._miscounted(buffers)
        every = zip(self._offsets, every_a, every_b, self._no_y or every_y, every_out, strict=True)
        try:
            for offset, a, b, y, out in every:
                _OF_SITE.pack_into(self._bytes, offset, a, b, y, out)
                bits |= a | b | y | out
        except ValueError as error:
            raise self._miscounted(buffers) from error
        return bits

    def _miscounted(self, buffers: GroupBuffers) -> TensorError:
        sites = len(self._sites)
        expected = (sites, sites, 0 if self._no_y else sites, sites)
        given = tuple(map(len, (buffers.a, buffers.b, buffers.y, buffers.out)))
        return TensorError(
            f"the group takes {expected} addresses of A, B, y and out, and was given {given}"
        )


class PlannedCall:
    """One call of the operator as one GPU runs it, to be launched with any addresses.

    It has an argument of its own, which the driver copies at each launch: launch it from one thread
    at a time.
    """

    def __init__(
        self,
        shape: GroupShape,
        launches: Sequence[tuple[Any, Launch]],
        unaligned: Callable[[], "PlannedCall"] | None = None,
    ) -> None:
        """Take the kernels in order, each with its launch.

        Args:
            shape: of the call.
            launches: for addresses that are aligned, or for any.
            unaligned: makes the call for other addresses, where that is another one.
        """
        self._argument = PackedArgument(shape, launches[0][1].splits)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument.group))
        self._address = ctypes.addressof(self._arguments)
        self._launches = tuple(
            (function, *launch.grid, launch.block, 1, 1, launch.shared_bytes)
            for function, launch in launches
        )
        self._unaligned = unaligned
        self._launch_kernel = checked_function("driver", "cuLaunchKernel")

    def launch(self, buffers: GroupBuffers, stream: int) -> None:
        """Enqueue the call on `stream`, a CUDA stream handle of that GPU.

        The first call with addresses that are not aligned may compile and load other kernels.
        The buffers stay alive, and A and B unchanged, until the stream has passed the call. The
        workspace has `workspace_bytes` bytes; what is in it before and after means nothing.

        Raises:
            BackendError: CUDA refused; with NVIDIA's own explanation.
            TensorError: an address is missing.
        """
        bits = self._argument.point_to(buffers)
        if self._unaligned and bits % VECTOR_BYTES:
            self._unaligned().launch(buffers, stream)
            return
        for launch in self._launches:
            self._launch_kernel(*launch, stream, self._address, 0)


class Kernels:
    """The kernels on the GPU of the stream that they are launched on, whichever is current."""

    def planned(self, shape: GroupShape, stream: int) -> PlannedCall:
        """Return a new call as the GPU of `stream` runs it; the driver is asked which that is.

        The first call with a dtype compiles and loads what `load` has not, so not while a stream is
        captured.

        Raises:
            BackendError: there is no GPU, or CUDA refused; with NVIDIA's own explanation.
            ConfigError: the kernels do not take such a group; see `launches_of`.
            TensorError: a dimension is out of range.
        """
        device = _device_of(stream)
        launches, is_for_any = _plan(shape, device, aligned=True)
        if is_for_any:
            return PlannedCall(shape, launches)

        @functools.cache
        def unaligned() -> PlannedCall:
            return PlannedCall(shape, _plan(shape, device, aligned=False)[0])

        return PlannedCall(shape, launches, unaligned)

    def load(self, dtype: str, *, has_slots: bool) -> None:
        """Compile all kernels of a dtype, in one call of the compiler, and load them.

        On the current GPU. Nothing is compiled or loaded by a call behind that: else a kernel is
        loaded by its first launch, which CUDA may refuse while a stream is captured.

        Args:
            dtype: of the nodes.
            has_slots: kernels for rows with adapters of their own, instead of the others.

        Raises:
            BackendError: there is no GPU, or CUDA refused; with NVIDIA's own explanation.
        """
        arch = architecture_of(chip_of(_device_of(0)))
        load_functions(_functions(arch, dtype, has_slots=has_slots).values())

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Plan and enqueue one call on `stream`; see `planned` and `PlannedCall.launch`."""
        self.planned(shape, stream).launch(buffers, stream)


def _device_of(stream: int) -> int:
    """The GPU on which work of the stream runs; that of the default stream is the current one."""
    return int(_call("cuStreamGetDevice", stream) if stream else _call("cuCtxGetDevice"))


@functools.lru_cache(maxsize=4096)  # all nodes of a kind have the same few shapes
def _plan(
    shape: GroupShape, device: int, *, aligned: bool
) -> tuple[tuple[tuple[Any, Launch], ...], bool]:
    """The kernels of a call in order, and whether addresses that are not aligned have the same."""
    chip = chip_of(device)
    functions = _functions(architecture_of(chip), shape.dtype, has_slots=shape.stacks is not None)
    launches = launches_of(shape, chip, aligned=aligned)
    kernels = tuple((functions[each.kernel], each) for each in launches)
    return kernels, launches_of(shape, chip, aligned=False) == launches


@functools.cache
def _functions(arch: str, dtype: str, *, has_slots: bool) -> Mapping[str, Any]:
    """All kernels of a dtype by name, which the driver loads on every GPU where they are launched.

    Together: one call of the compiler takes less time than one for each.
    """
    names = kernels_of(dtype, has_slots=has_slots)
    return load_kernels(compile_lora(arch, names), names)


def load_kernels(code: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Return kernels of PTX, or of a cubin, by their names, for `enqueue`.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    library = _call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
    found = {name: _call("cuLibraryGetKernel", library, name.encode()) for name in names}
    function = bindings("driver").CUfunction  # cuLaunchKernel takes either
    return {name: function(int(kernel)) for name, kernel in found.items()}


def load_functions(functions: Iterable[Any]) -> None:
    """Load kernels on the current GPU, which their first launch would do else.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    kernel = bindings("driver").CUkernel
    for function in functions:
        _call("cuFuncLoad", _call("cuKernelGetFunction", kernel(int(function))))


def enqueue(function: Any, launch: Launch, arguments: int, stream: int) -> None:
    """Enqueue one launch; `arguments` is the address of an array of the arguments' addresses.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    block = (launch.block, 1, 1)
    size = (*launch.grid, *block, launch.shared_bytes)
    _call("cuLaunchKernel", function, *size, stream, arguments, 0)


@functools.cache
def chip_of(device: int) -> Chip:
    """Return the launch parameters of a GPU, by its number in this process.

    Raises:
        BackendError: there is no such GPU; with NVIDIA's own explanation.
    """
    prefix = "CU_DEVICE_ATTRIBUTE"
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
    attributes = bindings("driver").CUdevice_attribute
    major, minor, multiprocessors = (
        int(_call("cuDeviceGetAttribute", getattr(attributes, f"{prefix}_{name}"), device))
        for name in names
    )
    return Chip((major, minor), multiprocessors)


def _call(function: str, *args: Any) -> Any:
    """Call a function of the CUDA driver and return its results."""
    _start_driver()
    return checked("driver", function, *args)


@functools.cache
def _start_driver() -> None:
    checked("driver", "cuInit", 0)
