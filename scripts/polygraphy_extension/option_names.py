"""Names of the options that the extension adds to `polygraphy run`."""

TENSORRT_LORA, FLOAT64 = "trt-lora", "lora-float64"  # the options of the runners
FLOAT64_NAME = "numpy with LoRA in float64"
NO_ADAPTER = "none"
FALLBACK = "trt-lora-fallback"
