"""The page about several engines: every container's command is one that starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TinyEngine
from support.doc_blocks import ROOT
from support.eventually import eventually
from support.served_engines import write_adapter
from support.served_process import started
from support.spoken_engine import spoken_engine

from trt_lora.runtime.manifest import read_manifest

PAGE = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
ENGINES = ("/engines/many", "/mnt/models")


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Every part of a document that is a container with a command."""
    if isinstance(node, dict):
        if "command" in node and "image" in node:
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


def commands() -> list[list[str]]:
    """The words behind `trt-lora serve` of each container; of equal ones, one."""
    blocks = [part.partition("```")[0] for part in PAGE.split("```yaml\n")[1:]]
    found = []
    for document in (one for block in blocks for one in yaml.safe_load_all(block)):
        for container in containers(document):
            words = [*container["command"], *container.get("args", [])]
            if words[0] == "trt-lora":
                words = words[1:]
            if words[0] == "serve" and words[1:] not in found:
                found.append(words[1:])
    return found


def test_there_are_a_pool_a_service_and_a_file_of_compose() -> None:
    assert len(commands()) == 3
    for kind in ("Deployment", "InferencePool", "LLMInferenceService"):
        assert f"kind: {kind}\n" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=["compose", "Deployment", "KServe"])
def test_the_command_of_a_container_starts(
    words: list[str], tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    engine = spoken_engine(tiny_engine.slots, tmp_path / "engine")
    write_adapter(tmp_path / "adapters" / "a", read_manifest(engine))
    places = {"/adapters": tmp_path / "adapters", "0.0.0.0": "127.0.0.1"}
    places |= dict.fromkeys(ENGINES, engine)
    with started(*(places.get(word, word) for word in words)) as server:
        assert eventually(lambda: server.is_ready() or server.process.poll() is not None)
        assert server.process.poll() is None, server.log
        names = {card["id"] for card in server.client.get("/v1/models").json()["data"]}
        assert "a" in names
