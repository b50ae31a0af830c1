"""A benchmark of two contestants, for what reads one."""

from trt_lora.scripts.measuring.benchmark import Benchmark, VariantTimes, WorkloadTimes

BENCHMARK = Benchmark(
    "tiny",
    "ONNX Runtime",
    {"cpu": "x86_64"},
    {"this process, now": 5_000_000},
    (
        WorkloadTimes(
            8,
            64,
            32,
            5,
            (
                VariantTimes("(base)", 0, 100.0, 1.0, 10.0, 11.0, 12.0, 1.0, 800.0),
                VariantTimes("json", 4, 120.0, 1.2, 12.5, 13.0, 14.0, 1.25, 640.0),
            ),
        ),
    ),
)
