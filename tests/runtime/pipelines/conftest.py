"""The stores of a pipeline's engines, and the adapters over all of them."""

import pytest
from support.adapters.diffusion.pipelines import stores

from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.store.store import AdapterStore


@pytest.fixture
def held() -> dict[str, AdapterStore]:
    return stores()


@pytest.fixture
def adapters(held: dict[str, AdapterStore]) -> PipelineAdapters:
    return PipelineAdapters(held)
