"""Random numbers that are the same in every test, no graph of torch, and files like vLLM's."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trt_lora.scripts.bench.gpu.layers.vllm_kernels import FILES


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def vllm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files with the imports and the signatures of vLLM's, computing by torch."""
    folder = Path(__file__).parents[2] / "support" / "fakes" / "like_vllm"
    for name in FILES:
        (tmp_path / name).write_text((folder / f"{name}.txt").read_text())
    before = dict(sys.modules)
    fake = type(sys)("triton")
    vars(fake).update(next_power_of_2=lambda n: n, cdiv=lambda a, b: -(-a // b))
    fake.language = type(sys)("triton.language")  # type: ignore[attr-defined]
    for module in (fake, fake.language):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if name.startswith("vllm"):
            del sys.modules[name]
