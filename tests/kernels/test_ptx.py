"""The PTX of device.cuh, which no CPU executes: each function is the instruction it should be.

The emulation has its own device.cuh, so what is planted in the real one must show here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import pytest

from trt_lora.plugins.kernels.constants import constant_declarations
from trt_lora.plugins.kernels.nvrtc import compile_source, entry_point, source

OPTIONS = ("--gpu-architecture=compute_90", "--std=c++17")
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32"


@dataclass(frozen=True)
class Word:
    """A function of device.cuh, what a kernel that only calls it does, and why."""

    call: str  # with to and from, pointers to global memory, and `shared`, to shared memory
    instructions: Sequence[str]  # in order; those that move numbers and addresses aside
    reason: str


MATRIX = "unsigned m[4]; {}(m, shared); write16(to, Pack{{m[0], m[1], m[2], m[3]}});"
PRODUCT = (
    "float s[4] = {}; const unsigned l[4] = {1, 2, 3, 4}; multiply(s, l, 5u, 6u, %s{});"
    "write((float*)to, s[0]);"
)

WORDS = {
    "load_matrices": Word(
        MATRIX.format("load_matrices"),
        [f"{LDMATRIX}.shared.b16", "st.global.v4.u32"],
        "x and t are row-major and the left operand of mma is: as they lie",
    ),
    "load_matrices_across": Word(
        MATRIX.format("load_matrices_across"),
        [f"{LDMATRIX}.trans.shared.b16", "st.global.v4.u32"],
        "A and B are row-major, the right operand of mma is column-major: transposed",
    ),
    "multiply Float16": Word(
        PRODUCT % "Float16", [f"{MMA}.f16.f16.f32", "st.global.f32"], "sums are float32"
    ),
    "multiply BFloat16": Word(
        PRODUCT % "BFloat16", [f"{MMA}.bf16.bf16.f32", "st.global.f32"], "sums are float32"
    ),
    "copy16": Word(
        "copy16(shared, from);",
        ["cp.async.cg.shared.global 16"],
        "16 bytes past the level-1 cache: no other CTA reads them here",
    ),
    "copy16_or_zeros": Word(
        "copy16_or_zeros(shared, from, read((const int*)from) > 0);",
        [
            "ld.global.u32",
            "setp.lt.s32 1",
            "selp.b32 0 16",
            "cp.async.cg.shared.global 16",
        ],
        "the source counts 16 bytes or none; what it does not count becomes zeros",
    ),
    "close_copies": Word("close_copies();", ["cp.async.commit_group"], "one batch a stage"),
    "wait_for_copies<0>": Word(
        "wait_for_copies<0>();", ["cp.async.wait_group 0"], "as many batches left as asked for"
    ),
    "wait_for_copies<1>": Word(
        "wait_for_copies<1>();", ["cp.async.wait_group 1"], "as many batches left as asked for"
    ),
    "cluster_arrive": Word(
        "cluster_arrive();",
        ["barrier.cluster.arrive.release"],
        "release: other CTAs read what was written to shared memory before",
    ),
    "cluster_arrive_relaxed": Word(
        "cluster_arrive_relaxed();",
        ["barrier.cluster.arrive.relaxed"],
        "relaxed: no barrier of memory, for where nothing is handed over",
    ),
    "cluster_wait": Word(
        "cluster_wait();",
        ["barrier.cluster.wait.acquire"],
        "acquire: reads behind it see what other CTAs released",
    ),
    "cluster_rank": Word(
        "write((int*)to, cluster_rank());",
        ["mov.u32 %cluster_ctarank", "st.global.u32"],
        "of the CTA in its cluster, not in the grid",
    ),
    "read_remote": Word(
        "write((float*)to, read_remote((float*)shared, 3));",
        ["mapa.shared::cluster.u32 3", "ld.shared::cluster.f32", "st.global.f32"],
        "the same address in another CTA's shared memory",
    ),
    "read_remote of four": Word(
        "write16(to, *(const Pack*)&(const Four&)read_remote((const Four*)shared, 3));",
        ["mapa.shared::cluster.u32 3", "ld.shared::cluster.v4.f32", "st.global.v4.f32"],
        "16 bytes at the same address in another CTA's shared memory",
    ),
    "low_halves": Word(
        "write((unsigned*)to, low_halves(threadIdx.x, blockIdx.x));",
        ["prmt.b32 21520", "st.global.u32"],
        "bytes 1, 0 of the first below 1, 0 of the second: 0x5410",
    ),
    "high_halves": Word(
        "write((unsigned*)to, high_halves(threadIdx.x, blockIdx.x));",
        ["prmt.b32 30258", "st.global.u32"],
        "bytes 3, 2 of the first below 3, 2 of the second: 0x7632",
    ),
    "shuffle_xor": Word(
        "write((float*)to, shuffle_xor(read((const float*)from), 5));",
        ["ld.global.nc.f32", "shfl.sync.bfly.b32 5 31 -1", "st.global.u32"],
        "all 32 lanes take part",
    ),
    "lanes_with": Word(
        "write((int*)to, int(lanes_with(read((const int*)from))));",
        ["ld.global.u32", "match.any.sync.b32 -1", "st.global.u32"],
        "all 32 lanes take part",
    ),
    "of_lane": Word(
        "write((int*)to, of_lane(read((const int*)from), 3));",
        ["ld.global.u32", "shfl.sync.idx.b32 3 31 -1", "st.global.u32"],
        "all 32 lanes take part",
    ),
    "widen Float16": Word(
        "write((float*)to, widen(read((const Float16*)from)));",
        ["ld.global.nc.u16", "cvt.f32.f16", "st.global.f32"],
        "exact",
    ),
    "round_to Float16": Word(
        "Float16 h; round_to(h, read((const float*)from)); write((Float16*)to, h);",
        ["ld.global.nc.f32", "cvt.rn.f16.f32", "st.global.u16"],
        "to nearest, ties to even: the one rounding of the oracle's bound",
    ),
    "round_to BFloat16": Word(
        "BFloat16 h; round_to(h, read((const float*)from)); write((BFloat16*)to, h);",
        ["ld.global.nc.f32", "cvt.rn.bf16.f32", "st.global.u16"],
        "to nearest, ties to even: the one rounding of the oracle's bound",
    ),
    "read16": Word(
        "write16(to, read16(from));",
        ["ld.global.nc.v4.u32", "st.global.v4.u32"],
        "16 bytes in one load and one store",
    ),
    "prefetch": Word("prefetch(from);", ["prefetch.global.L2"], "to where any CTA finds it"),
}

# How often the sources' loops, unrolled as far as they are, have the instructions that matter.
KERNELS = {
    "fused_tiles_float16": {
        f"{LDMATRIX}.shared.b16": 16,
        f"{LDMATRIX}.trans.shared.b16": 9,
        f"{MMA}.f16.f16.f32": 32,
        "cp.async.wait_group 0": 1,  # B, and all else
        "cp.async.wait_group 1": 1,  # two of three stages are filled: the older has landed
        "barrier.cluster.arrive.release": 1,  # before the parts are read
        "barrier.cluster.arrive.relaxed": 1,  # before the CTA leaves
        "barrier.cluster.wait.acquire": 2,
    },
    "decode_bfloat16_8": {
        f"{LDMATRIX}.trans.shared.b16": 8,  # four chunks of two
        f"{MMA}.bf16.bf16.f32": 16,  # of A as many, and of B four, for both parts of t
        "cp.async.wait_group 0": 1,
        "barrier.cluster.arrive.release": 1,
        "barrier.cluster.arrive.relaxed": 1,
        "barrier.cluster.wait.acquire": 2,
    },
    "decode_float16_32": {
        f"{LDMATRIX}.trans.shared.b16": 8,
        f"{MMA}.f16.f16.f32": 64,  # each of four row tiles as often as the one above
        "cp.async.wait_group 0": 1,
        "barrier.cluster.arrive.release": 1,
        "barrier.cluster.arrive.relaxed": 1,
        "barrier.cluster.wait.acquire": 2,
    },
    "shrink_tiles_bfloat16": {
        f"{LDMATRIX}.shared.b16": 2,
        f"{LDMATRIX}.trans.shared.b16": 8,
        f"{MMA}.bf16.bf16.f32": 16,
        "cp.async.wait_group 1": 1,
        "barrier.cluster.arrive.release": 1,
        "barrier.cluster.arrive.relaxed": 1,
        "barrier.cluster.wait.acquire": 2,
    },
    "expand_tiles_bfloat16": {
        f"{LDMATRIX}.shared.b16": 6,
        f"{LDMATRIX}.trans.shared.b16": 12,
        f"{MMA}.bf16.bf16.f32": 48,
        "cp.async.wait_group 0": 1,
    },
    "fused_float32_1": {
        "barrier.cluster.arrive.release": 1,
        "barrier.cluster.arrive.relaxed": 1,
        "barrier.cluster.wait.acquire": 2,
    },
}
_PLUMBING = r"ret|mov|cvta|cvt\.u32\.u64|ld\.param"
COUNTED = ("ldmatrix", "mma", "cp.async.wait", "barrier")


def device() -> str:
    return files("trt_lora.plugins.kernels").joinpath("device.cuh").read_text()


def probe(name: str, word: Word) -> str:
    return (
        f'extern "C" __global__ void {name}(void* to, const void* from) '
        f"{{ auto* shared = shared_memory(); {word.call} }}\n"
    )


def instructions(body: str) -> list[str]:
    """What a kernel's PTX does, with immediates and special registers."""
    constants = dict(re.findall(r"mov\.\w+\s+(%\w+), (-?\w+);", body))
    found = []
    for opcode, operands in re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)(.*);", body, re.M):
        if "%cluster" in operands or not re.match(_PLUMBING, opcode):
            found.append(" ".join((opcode, *_immediates(opcode, operands, constants))))
    return found


def _immediates(opcode: str, operands: str, constants: Mapping[str, str]) -> list[str]:
    if opcode.startswith(("ld", "st", "mma")):
        return []
    operands = re.sub(r"[{\[][^]}]*[]}]", "", operands)
    given = [constants.get(each, each) for each in re.findall(r"[%\w-]+", operands)]
    return [each for each in given if not re.fullmatch(r"%[a-z]+\d+", each)]


def bodies(ptx: str) -> dict[str, str]:
    """The text between the braces of each kernel."""
    return dict(re.findall(r"\.entry (\w+)\([^)]*\)[^{]*\{(.*?)^\}", ptx, re.DOTALL | re.MULTILINE))


def wrong_words(text: str) -> dict[str, list[str]]:
    """The functions of a device.cuh that are other instructions than they should be."""
    probes = {f"probe_{index}": name for index, name in enumerate(WORDS)}
    entries = "".join(probe(entry, WORDS[name]) for entry, name in probes.items())
    found = bodies(compile_source(constant_declarations() + text + entries, OPTIONS).decode())
    made = {name: instructions(found[entry]) for entry, name in probes.items()}
    return {name: each for name, each in made.items() if each != WORDS[name].instructions}


def counts(kernel: str) -> Counter[str]:
    ptx = compile_source(source() + entry_point(kernel), OPTIONS).decode()
    return Counter(each for each in instructions(ptx) if each.startswith(COUNTED))


def test_each_function_is_its_instruction() -> None:
    assert wrong_words(device()) == {}


def test_before_clusters_their_barrier_is_that_of_the_cta() -> None:
    both = Word("cluster_arrive(); cluster_wait();", (), "arrive is nothing, wait is __syncthreads")
    text = constant_declarations() + device() + probe("both", both)
    ptx = compile_source(text, ("--gpu-architecture=compute_80", "--std=c++17")).decode()
    assert instructions(bodies(ptx)["both"]) == ["bar.sync 0"]


def test_no_instruction_is_written_that_is_not_looked_at() -> None:
    written = re.findall(r'asm(?: volatile)?\("([a-z][\w.:]*)', device())
    seen = [each.split()[0] for word in WORDS.values() for each in word.instructions]
    assert set(written) <= set(seen)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_made_of_so_many(kernel: str) -> None:
    assert counts(kernel) == KERNELS[kernel]


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (".x4.trans.", ".x4.", {"load_matrices_across"}),
        ("arrive.release", "arrive.relaxed", {"cluster_arrive"}),
        ('"n"(Left)', '"n"(Left + 1)', {"wait_for_copies<0>", "wait_for_copies<1>"}),
        ("cp.async.commit_group;", "", {"close_copies"}),
        ("f32.bf16.bf16.f32", "f32.f16.f16.f32", {"multiply BFloat16"}),
        ("cvt.rn.bf16", "cvt.rz.bf16", {"round_to BFloat16"}),
        ("%%cluster_ctarank", "%%ctaid.x", {"cluster_rank"}),
        ("ld.shared::cluster.f32", "ld.shared.f32", {"read_remote"}),
        ("ld.shared::cluster.v4", "ld.shared.v4", {"read_remote of four"}),
        ("arrive.relaxed", "arrive.release", {"cluster_arrive_relaxed"}),
        ("there ? 16 : 0", "there ? 16 : 8", {"copy16_or_zeros"}),
        ("second, 0x7632", "second, 0x5432", {"high_halves"}),
        ("0xffffffffu", "0xffffu", {"shuffle_xor", "lanes_with", "of_lane"}),
    ],
)
def test_a_planted_bug_is_found(old: str, new: str, wrong: set[str]) -> None:
    assert old in device()
    assert set(wrong_words(device().replace(old, new))) == wrong
