"""Plans of small components of pipelines, as the benchmark builds them; no GPU is needed."""

import pytest

from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.scripts.bench.diffusion.components import kernel_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not TENSORRT_RTX.installed, reason="TensorRT-RTX has wheels for few platforms"
    ),
]


@pytest.mark.parametrize(("name", "dtype"), [("Wan", "float16"), ("CLIP-G", "bfloat16")])
def test_lora_adds_few_kernels_and_no_copies(name: str, dtype: str) -> None:
    """Wan keeps some modules in float32."""
    (row,) = kernel_rows(name, [dtype])
    assert row.variants["without LoRA"] > 30
    assert 0 < float(str(row.ratios["kernels a site"])) <= 0.9
    assert row.ratios["pad copies"] == 0
