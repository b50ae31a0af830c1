"""All workloads of all benchmarks, most important first: a deadline cuts the end."""

from trt_lora.plugins.tensorrt.flavour import FLAVOURS
from trt_lora.scripts.bench.diffusion.small_components import MODELS
from trt_lora.scripts.bench.gpu.gpu_tests import FAMILIES, REST
from trt_lora.scripts.measuring.worker import Workload


def _workload(name: str, question: str, weight: float, place: str, *arguments: object) -> Workload:
    """Its place is below this package."""
    return Workload(name, question, weight, f"trt_lora.scripts.bench.{place}", arguments)


# The weight is the share of the time, in seconds where all need all of theirs.
CPU = (
    _workload("plan", "What does LoRA add to an answer, and a switch cost?", 240, "plan:demo_rows"),
    _workload("host-step", "What does a step cost the host?", 60, "host_step:rows"),
    _workload("scheduling", "What does choosing who joins cost?", 30, "scheduling:rows"),
    _workload("adapter-cache", "What does an adapter cost by where it lies?", 90,
              "adapter_cache:rows"),
    _workload("strengths", "What does another strength cost?", 60, "strengths:rows"),
    _workload("denoiser", "What does LoRA add to a step of a UNet?", 180,
              "diffusion.denoiser_step:rows"),
    _workload("codes", "What do weights in codes take, lose and gain?", 400, "codes:rows"),
    _workload("experts", "What does a mixture cost beside what a token takes of it?", 120,
              "experts:rows"),
    _workload("serving", "What do HTTP and another process cost?", 150, "http_serving:rows"),
    _workload("serving:load", "What do requests do to each other?", 150, "serving_load:rows"),
    _workload("peers", "How fast are transformers, PEFT and we?", 300, "peers.__main__:rows"),
    _workload("components", "How long does SD1.5's UNet take to build?", 150,
              "diffusion.components:build_rows"),
    *(
        _workload(f"components:{name}", "How many kernels does LoRA add?", 120,
                  "diffusion.components:kernel_rows", name)
        for name in MODELS
    ),
)  # fmt: skip
GPU = (
    _workload("compilation", "Does every kernel compile?", 40,
              "gpu.kernel_compilation:rows"),
    _workload("ceilings", "What does this GPU reach?", 15, "gpu.ceilings:rows"),
    *(
        _workload(
            f"correctness:{family}",
            "Are its results those of float64, and memory around them untouched?",
            12,
            "gpu.gpu_tests:rows_of_family",
            family,
        )
        for family in FAMILIES
    ),
    _workload("tests", "Do the other tests marked gpu pass?", 90, "gpu.gpu_tests:rows", REST),
    _workload("races", "Does compute-sanitizer find one?", 40, "gpu.gpu_tests:race_rows"),
    _workload("kernels", "What do the kernels cost beside cuBLAS?", 130, "gpu.kernels:rows"),
    _workload("beside-gemm", "What does LoRA add to its GEMM, and idle LoRA?", 60,
              "gpu.beside_gemm:rows"),
    _workload("denoisers", "What does LoRA add to SDXL's and Flux's layers?", 60,
              "gpu.denoisers:rows"),
    *(
        _workload(f"plan:{flavour.name}", "What does LoRA add to a plan's answer, and a switch "
                  "cost?", 150, "plan:gpu_rows", flavour.name)
        for flavour in FLAVOURS
    ),
)  # fmt: skip
