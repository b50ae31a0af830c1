"""A server that does not start leaves nothing behind, and says why."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.served_engines import Spoken, write_adapter
from support.web_server import web_server

from trt_lora.plugins.errors import AdapterError, BackendError, ConfigError, LoRAError
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.server.running_server import ServerConfig, started


def error_of(config: ServerConfig) -> LoRAError:
    """The error of a start; no thread of it is left."""
    before = set(threading.enumerate())
    with pytest.raises(LoRAError) as raised:
        asyncio.run(started(config))
    assert [t for t in threading.enumerate() if t not in before and t.name[:3] == "trt"] == []
    return raised.value


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"backend": "tensorrt"}, BackendError, "cannot run on TensorRT"),
        ({"max_model_len": 65}, ConfigError, "--max-model-len is 65, expected 1 to 64"),
        ({"max_model_len": 0}, ConfigError, "--max-model-len is 0, expected 1 to 64"),
        ({"max_lora_rank": 17}, ConfigError, "--max-lora-rank is 17, expected 1 to 16"),
        ({"max_loras": 3}, ConfigError, "--max-loras is 3, expected 1 to 2"),
        ({"dtype": "bfloat16"}, ConfigError, "--dtype is bfloat16"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    spoken: Spoken, fields: dict[str, Any], kind: type[LoRAError], message: str
) -> None:
    error = error_of(spoken.config(**fields))
    assert isinstance(error, kind)
    assert message in str(error)


def test_an_adapter_that_cannot_be_loaded_is_named(spoken: Spoken, tmp_path: Path) -> None:
    good = ("a", str(spoken.adapters["a"]))
    wide = write_adapter(tmp_path / "wide", read_manifest(spoken.engine), rank=16)
    roots = {"lora_roots": [spoken.root, tmp_path]}
    for bad, fields, message in (
        (("x", str(tmp_path / "x")), {}, "--lora-modules x: Loading lora x failed: No adapter"),
        (("base", good[1]), {}, "--lora-modules base: The lora adapter 'base' conflicts"),
        (good, {}, "--lora-modules a: The lora adapter 'a' has already been loaded"),
        (("x", str(wide)), {"max_lora_rank": 8}, "greater than max_lora_rank 8"),
    ):
        error = error_of(spoken.config(lora_modules=[good, bad], **roots, **fields))
        assert isinstance(error, AdapterError)
        assert message in str(error)


def test_a_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    error_of(ServerConfig(tmp_path, in_process=True))


def test_a_limit_below_the_engines_is_kept(spoken: Spoken) -> None:
    modules = [(name, str(path)) for name, path in spoken.adapters.items()]
    with web_server(spoken.config(lora_modules=modules, max_loras=1)) as web:
        for name in "abab":
            web.answer("/v1/completions", prompt=[5], model=name, max_tokens=1)
        known = web.client.get("/v1/lora_adapters").json()["data"]
        assert [each["slot"] for each in known if each["level"] == "slot"] == [0]
