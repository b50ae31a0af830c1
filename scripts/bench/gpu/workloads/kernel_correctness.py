"""Every kernel of one family against float64: a row for those that are launched together."""

from collections.abc import Iterator

from trt_lora.plugins.launch import Chip, plan_launches
from trt_lora.scripts.bench.gpu.correctness import CaseResult, KernelCase, all_cases, check
from trt_lora.scripts.bench.gpu.launcher import Launcher
from trt_lora.scripts.bench.gpu.raw_memory import RawMemory
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.worker import WrongResultError

Kernels = tuple[str, ...]

_WORST = "worst element / allowed"


def families(chip: Chip) -> list[str]:
    """Return the families that this chip gets, such as `fused_tiles` or `shrink+expand`."""
    return sorted({_family(case, chip) for case in all_cases()})


def expectations(family: str, chip: Chip) -> Expectations:
    """Return the rows of a family in their order: the one that ends the process is then known."""
    target = {_WORST: Expectation(at_most=1.0)}
    return {" + ".join(names): target for names in _by_kernels(family, chip)}


def rows(family: str, chip: Chip, kernels: Launcher, memory: RawMemory) -> Iterator[ResultRow]:
    """Check every case of a family; a row for each kernel, or two that follow one another.

    Raises:
        WrongResultError: at the end, if a case was wrong; it names the first of them.
    """
    wrong: list[CaseResult] = []
    for names, cases in _by_kernels(family, chip).items():
        results = [check(case, chip, kernels, memory) for case in cases]
        wrong += [result for result in results if not result.is_right]
        yield _row(names, results)
    if wrong:
        raise WrongResultError(f"{len(wrong)} cases are wrong; the first: {wrong[0]}")


def _by_kernels(family: str, chip: Chip) -> dict[Kernels, list[KernelCase]]:
    found: dict[Kernels, list[KernelCase]] = {}
    for case in all_cases():
        if _family(case, chip) == family:
            found.setdefault(_kernels(case, chip), []).append(case)
    return found


def _kernels(case: KernelCase, chip: Chip) -> Kernels:
    return tuple(launch.kernel for launch in plan_launches(case.shape, chip))


def _family(case: KernelCase, chip: Chip) -> str:
    return "+".join(name.partition(f"_{case.shape.dtype}")[0] for name in _kernels(case, chip))


def _row(names: Kernels, results: list[CaseResult]) -> ResultRow:
    return ResultRow(
        " + ".join(names),
        {"cases": len(results)},
        ratios={
            "||out - ref|| / ||ref||": max(result.relative_error for result in results),
            _WORST: max(result.of_allowed for result in results),
        },
        notes={"wrong": [result.name for result in results if not result.is_right]},
    )
