"""The ahead-of-time plugins, as far as no GPU is needed: what TensorRT is told, and the kernel.

TensorRT is a recorded fake here. Nothing of this has met the real one.
"""

import ctypes
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import pytest
from kernels.calls import Call, make_call
from kernels.emulator import build, compiler, emulate, kernel_text, range_of
from kernels.guarded_buffer import Guarded, HostMemory
from support.fakes import fake_aot_api as fake_qdp
from support.fakes.fake_aot_api import FakeTensorRT, Kernel

from trt_lora.plugins.contract.operators import OPERATORS, Operator
from trt_lora.plugins.errors import BackendError, ConfigError, TensorError
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import TILES, Chip, Launch, fused_launch
from trt_lora.plugins.kernels.launcher import KernelGroup
from trt_lora.plugins.tensorrt import aot_plugins as qdp
from trt_lora.plugins.tensorrt.aot_kernel import kernel_parameters, kernel_ptx, kernel_source
from trt_lora.plugins.tensorrt.aot_plugins import NODE_ATTRIBUTES, register_aot_plugins
from trt_lora.runtime.memory.dtypes import Array

A100, H200 = Chip((8, 0), 108), Chip((9, 0), 132)
CHIPS = pytest.mark.parametrize("chip", [A100, H200], ids=["sm80", "sm90"])
KINDS = pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.name)
DATA_TYPES = {"float16": "HALF", "bfloat16": "BF16", "float32": "FLOAT"}
WIDTHS = (4096, 1024, 1000, 7, 14336, 64, 1, 256)  # n of the sites


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    return fake_qdp.install(monkeypatch)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without their PTX, where only the rest is looked at."""
    monkeypatch.setattr(qdp, "kernel_ptx", lambda kind, dtype, rows, arch: (f"{rows}", b""))


def group(kind: Operator, *, m: int = 8, rank: int = 64, dtype: str = "float16") -> GroupShape:
    """A group of the operator, with a different n and rank at each site."""
    sites = (SiteShape(WIDTHS[i], max(1, rank - i)) for i in range(kind.sites))
    return GroupShape(m, 4096, tuple(sites), dtype, kind.has_addend)


def symbolic_shapes(kind: Operator, shape: GroupShape) -> list[list[str | int]]:
    """The inputs' shapes in a graph: batch, sequence and ranks are symbols."""
    shapes: list[list[str | int]] = [[] for _ in range(kind.inputs)]
    shapes[0] = ["batch", "sequence", shape.k]
    for i, site in enumerate(shape.sites):
        a, b = kind.factors(i)
        shapes[a], shapes[b] = [shape.k, f"rank_{i}"], [f"rank_{i}", site.n]
        if kind.has_addend:
            shapes[kind.addend(i)] = ["batch", "sequence", site.n]
    return shapes


def sizes(shape: GroupShape, batch: int = 1) -> dict[str, int]:
    """What the symbols are for a group."""
    ranks = {f"rank_{i}": site.rank for i, site in enumerate(shape.sites)}
    return {"batch": batch, "sequence": shape.m // batch} | ranks


def build_node(trt: FakeTensorRT, kind: Operator, shape: GroupShape) -> dict[int, Kernel]:
    dtype = DATA_TYPES[shape.dtype]
    identity = f"{NODE_ATTRIBUTES['plugin_namespace']}::{kind.name}"
    return trt.build(identity, symbolic_shapes(kind, shape), dtype)


@pytest.mark.usefixtures("no_compiler")
@KINDS
def test_an_operator_is_registered_with_the_signature_that_tensorrt_reads(
    trt: FakeTensorRT, kind: Operator
) -> None:
    register_aot_plugins(trt, [group(kind)], H200)
    plugin = trt.plugin.known[f"trt_lora::{kind.name}"]
    assert len(plugin.inputs) == kind.inputs
    assert plugin.outputs == kind.sites
    for i in range(kind.sites):
        assert [plugin.inputs[j] for j in kind.factors(i)] == [f"a_{i}", f"b_{i}"]
        if kind.has_addend:
            assert plugin.inputs[kind.addend(i)] == f"c_{i}"


def test_a_node_asks_for_the_ahead_of_time_plugin_of_our_namespace() -> None:
    assert NODE_ATTRIBUTES == {"plugin_namespace": "trt_lora", "aot": 1}


@pytest.mark.usefixtures("no_compiler")
def test_a_later_registration_replaces_the_first(trt: FakeTensorRT) -> None:
    kind = Operator(1, has_addend=True)
    for dtype in ("float16", "bfloat16", "bfloat16"):
        shape = group(kind, dtype=dtype)
        register_aot_plugins(trt, [shape], H200)
        assert build_node(trt, kind, shape)  # the fake refuses another dtype


@pytest.mark.usefixtures("no_compiler")
@KINDS
def test_outputs_have_the_leading_dimensions_of_x_and_the_width_of_b(
    trt: FakeTensorRT, kind: Operator
) -> None:
    shape = group(kind, m=6)
    register_aot_plugins(trt, [shape], H200)
    kernel = build_node(trt, kind, shape)[1]
    outputs = [[d.evaluate(sizes(shape, batch=2)) for d in dims] for dims in kernel.outputs]
    assert outputs == [[2, 3, site.n] for site in shape.sites]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("batch", [1, 3])
@KINDS
def test_the_integers_are_m_and_k_and_each_sites_n_and_rank(
    trt: FakeTensorRT, kind: Operator, batch: int
) -> None:
    shape = group(kind, m=6)
    register_aot_plugins(trt, [shape], H200)
    inputs, outputs = range(100, 100 + kind.inputs), range(200, 200 + kind.sites)
    expected = [6, 4096, *(size for site in shape.sites for size in (site.n, site.rank))]
    for kernel in build_node(trt, kind, shape).values():
        arguments = kernel.arguments(inputs, sizes(shape, batch), outputs)
        assert [value for _, value in arguments] == [*inputs, *expected, *outputs]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("dtype", DATA_TYPES)
@CHIPS
@pytest.mark.parametrize("kind", [*OPERATORS[:6], OPERATORS[-1]], ids=lambda kind: kind.name)
def test_the_expressions_give_the_launch_that_launch_py_gives(
    trt: FakeTensorRT, kind: Operator, chip: Chip, dtype: str
) -> None:
    register_aot_plugins(trt, [group(kind, m=4096, rank=512, dtype=dtype)], chip)
    found = set()
    for rank in (8, 9, 16, 33, 64, 512):
        for m in (1, 2, 4, 5, 8, 9, 4096):
            shape = group(kind, m=m, rank=rank, dtype=dtype)
            expected = fused_launch(shape, chip)
            rows = int(expected.kernel.rpartition("_")[2])
            if kernel := build_node(trt, kind, shape).get(rows):
                assert launch_of(kernel, shape, chip, expected.kernel) == expected
                assert kernel.name == f"{rows}"
                found.add(rows)
    assert 1 in found


def launch_of(kernel: Kernel, shape: GroupShape, chip: Chip, name: str, batch: int = 1) -> Launch:
    at = kernel.launch_at(sizes(shape, batch))
    assert (at["block_y"], at["block_z"]) == (1, 1)
    grid = (at["grid_x"], at["grid_y"], at["grid_z"])
    return Launch(name, grid, at["block_x"], chip.cluster, at["shared_mem"], splits=1)


@pytest.mark.usefixtures("no_compiler")
@KINDS
def test_the_largest_shapes_stay_within_what_a_launch_may_have_unasked(
    trt: FakeTensorRT, kind: Operator
) -> None:
    for m, rank, dtype in itertools.product((1, 8, 65535), (1, 64, 512), DATA_TYPES):
        shape = group(kind, m=m, rank=rank, dtype=dtype)
        register_aot_plugins(trt, [shape], H200)
        kernels = build_node(trt, kind, shape)
        assert kernels
        for rows, kernel in kernels.items():
            launch = kernel.launch_at(sizes(shape))
            assert launch["shared_mem"] <= 48 * 1024
            assert m <= launch["grid_y"] * rows
            assert launch["grid_y"] <= 65535


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("m", "rank", "tiles"),
    [
        (1, 8, (1,)),
        (4, 8, (1, 4)),
        (5, 8, TILES),
        (9, 8, TILES),
        (9, 512, (1,)),
        (65536, 8, (4, 8)),
    ],
)
def test_tensorrt_times_the_tiles_that_fit_and_that_m_fills(
    trt: FakeTensorRT, m: int, rank: int, tiles: tuple[int, ...]
) -> None:
    kind = Operator(8, has_addend=False)
    shape = replace(group(kind, m=m), sites=(SiteShape(64, rank),) * 8)
    register_aot_plugins(trt, [shape], H200)
    assert tuple(build_node(trt, kind, shape)) == tiles


@pytest.mark.usefixtures("no_compiler")
def test_tiles_fit_the_largest_node_of_an_operator(trt: FakeTensorRT) -> None:
    kind = Operator(8, has_addend=True)
    small, large = (replace(group(kind), sites=(SiteShape(64, r),) * 8) for r in (8, 512))
    register_aot_plugins(trt, [small, large, small], H200)
    assert tuple(build_node(trt, kind, small)) == (1,)


# ---- the kernel as PTX


def entry_of(ptx: str, name: str) -> tuple[list[str], str]:
    """The types of a kernel's parameters, and its directives."""
    match = re.search(rf"\.visible \.entry {name}\((.*?)\)(.*?)\n{{", ptx, re.DOTALL)
    assert match
    types = re.findall(r"\.param \.(\w+)[^,]*?\w+_param_\d+", match[1])
    return types, match[2]


@CHIPS
@pytest.mark.parametrize(
    "kind",
    [Operator(1, has_addend=False), Operator(3, has_addend=True), Operator(8, has_addend=True)],
    ids=lambda kind: kind.name,
)
def test_the_ptx_takes_the_arguments_that_tensorrt_passes(
    trt: FakeTensorRT, kind: Operator, chip: Chip
) -> None:
    shape = group(kind, m=1)
    register_aot_plugins(trt, [shape], chip)
    kernel = build_node(trt, kind, shape)[1]
    arguments = kernel.arguments([0] * kind.inputs, sizes(shape), [0] * kind.sites)
    types, directives = entry_of(kernel.ptx.decode(), kernel.name)
    assert types == [kind_of_value for kind_of_value, _ in arguments]
    assert kernel.ptx.count(b".entry") == 1
    assert b"\0" not in kernel.ptx
    assert f".target sm_{'90' if chip == H200 else '80'}\n" in kernel.ptx.decode()
    assert (".reqnctapercluster 8, 1, 1" in directives) == (chip == H200)
    assert ".maxntid 256" in directives


def test_a_kernel_has_no_shared_memory_of_its_own() -> None:
    """It would count in the 48 KB and is not in the launch."""
    _, ptx = kernel_ptx(Operator(1, has_addend=False), "float32", 1, "compute_80")
    assert re.findall(rb"^\s*\.shared .*", ptx, re.MULTILINE) == []


# ---- the kernel on a CPU, called as TensorRT calls

SPREAD = """
void** arguments;
extern "C" void set_arguments(void** to) { arguments = to; }
template <class... Types, size_t... I>
void spread(void (*kernel)(Types...), std::index_sequence<I...>) {
  kernel(*static_cast<Types*>(arguments[I])...);
}
template <class... Types> void spread(void (*kernel)(Types...)) {
  spread(kernel, std::index_sequence_for<Types...>());
}
"""
EMULATED = [(Operator(3, has_addend=True), "float16"), (Operator(2, has_addend=False), "float32")]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    text = kernel_text() + SPREAD
    for kind, dtype in EMULATED:
        for rows in TILES:
            name, kernel = kernel_source(kind, dtype, rows)
            text += f'{kernel}extern "C" void spread_{name}(Group) {{ spread({name}); }}\n'
    return build(text)


def inputs_of(kind: Operator, call: Call) -> list[Array]:
    """The inputs of a node, in the operator's order."""
    inputs = [call.inputs.x] * kind.inputs
    for i in range(kind.sites):
        a, b = kind.factors(i)
        inputs[a], inputs[b] = call.inputs.a[i], call.inputs.b[i]
        if kind.has_addend:
            inputs[kind.addend(i)] = call.inputs.y[i]
    return inputs


def call_kernel(
    library: ctypes.CDLL, kernel: Kernel, kind: Operator, call: Call, chip: Chip
) -> list[Array]:
    """The outputs of a launch with the arguments that TensorRT would pass."""
    memory, x = HostMemory(), call.inputs.x
    inputs = [Guarded(memory, each.nbytes, each) for each in inputs_of(kind, call)]
    outputs = [Guarded(memory, len(x) * site.n * x.itemsize) for site in call.shape.sites]
    addresses = [[each.address for each in group] for group in (inputs, outputs)]
    given = kernel.arguments(addresses[0], sizes(call.shape), addresses[1])
    assert len(given) == len(kernel_parameters(kind))
    values = [(ctypes.c_uint64 if kind == "u64" else ctypes.c_int)(v) for kind, v in given]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    library.set_arguments(pointers)
    launch = launch_of(kernel, call.shape, chip, f"spread_{kernel.name}")
    emulate(library, launch, KernelGroup(), list(map(range_of, (*inputs, *outputs))))
    assert all(each.is_intact() for each in (*inputs, *outputs))
    return [each.read().view(x.dtype).reshape(len(x), -1) for each in outputs]


@pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")
@pytest.mark.parametrize(("kind", "dtype"), EMULATED, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("m", [1, 3, 13])
@CHIPS
def test_the_kernel_computes_from_the_arguments_that_tensorrt_passes(
    trt: FakeTensorRT,
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    kind: Operator,
    dtype: str,
    m: int,
    chip: Chip,
) -> None:
    monkeypatch.setattr(qdp, "kernel_ptx", lambda *key: (kernel_source(*key[:3])[0], b""))
    widths_and_ranks = [(72, 8), (40, 3), (64, 16)][: kind.sites]
    call = make_call(m, 136, widths_and_ranks, dtype, has_addend=kind.has_addend)
    register_aot_plugins(trt, [call.shape], chip)
    for kernel in build_node(trt, kind, call.shape).values():
        assert call.worst(call_kernel(library, kernel, kind, call, chip)) <= 1


# ---- refusals


def refusal(
    trt: ModuleType, largest: Sequence[GroupShape], chip: Chip, error: type[Exception]
) -> str:
    """The message of a refused registration, which registers nothing."""
    with pytest.raises(error) as caught:
        register_aot_plugins(trt, largest, chip)
    known: Mapping[str, object] = getattr(getattr(trt, "plugin", None), "known", {})
    assert not known
    return str(caught.value)


@pytest.mark.usefixtures("no_compiler")
def test_a_group_too_large_for_one_launch_is_refused_with_the_choices(trt: FakeTensorRT) -> None:
    kind = Operator(8, has_addend=True)
    shape = replace(group(kind, m=100_000), sites=(SiteShape(64, 512),) * 8)
    message = refusal(trt, [group(Operator(1, has_addend=True)), shape], H200, ConfigError)
    for word in (
        "LoraAdd8",
        "100000",
        "4096",
        "--max-lora-rank",
        "--max-seq-len",
        "smaller groups",
    ):
        assert word in message


def test_groups_of_several_dtypes_are_refused(trt: FakeTensorRT) -> None:
    groups = [
        group(Operator(1, has_addend), dtype=d)
        for has_addend, d in ((True, "float16"), (False, "float32"))
    ]
    assert "float16 and float32" in refusal(trt, groups, H200, ConfigError)


def test_an_old_gpu_is_refused(trt: FakeTensorRT) -> None:
    largest = [group(Operator(1, has_addend=True))]
    assert "7.5" in refusal(trt, largest, Chip((7, 5), 40), ConfigError)


def test_sizes_that_no_kernel_takes_are_refused(trt: FakeTensorRT) -> None:
    kind = Operator(1, has_addend=True)
    assert "513" in refusal(trt, [group(kind, rank=513)], H200, TensorError)
    assert "int8" in refusal(trt, [group(kind, dtype="int8")], H200, ConfigError)


@pytest.mark.parametrize("has_plugins", [False, True])
def test_a_library_without_ahead_of_time_plugins_is_refused(
    monkeypatch: pytest.MonkeyPatch, has_plugins: bool
) -> None:
    trt = ModuleType("fake_tensorrt_rtx")
    trt.__dict__["__version__"] = "1.7.1"
    monkeypatch.setitem(sys.modules, trt.__name__, trt)
    if has_plugins:  # as TensorRT 10.7 has them, run by Python
        name = f"{trt.__name__}.plugin"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    message = refusal(trt, [group(Operator(1, has_addend=True))], H200, BackendError)
    assert "1.7.1" in message
    assert "10.10" in message
