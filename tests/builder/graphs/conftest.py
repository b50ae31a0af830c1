"""Graphs of one model by three exporters, and an engine of each, made once a run."""

import pytest
from support.models.graph_nets import SIZES, Built, Exported, export

from trt_lora.builder import GraphConfig, build_engine


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="session")
def built(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """An engine of each graph; the first has a plan of TensorRT-RTX."""
    folder, engines = tmp_path_factory.mktemp("graph-engines"), {}
    for place, (kind, path) in enumerate(exported.graphs.items()):
        flavour = "none" if place else "tensorrt-rtx"
        config = GraphConfig(
            path, folder / kind, ("all-linear",), max_lora_rank=8, shapes=SIZES, flavour=flavour
        )
        engines[kind] = Built(folder / kind, build_engine(config))
    return engines
