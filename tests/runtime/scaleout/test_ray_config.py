"""What Ray Serve is told, and what becomes of it."""

from pathlib import Path

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.scaleout.ray_config import RayConfig


def test_words_of_a_command_line_are_read() -> None:
    given = {"engine": "e", "replicas": "2", "num_gpus": "0.5", "allow_runtime_lora_updating": "1"}
    config = RayConfig.of(given)
    assert (config.replicas, config.num_gpus, config.allow_runtime_lora_updating) == (2, 0.5, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["engine"]),
        ({"engine": "e", "lora_dirs": "x"}, ["lora_dirs", "lora_dir,"]),
        ({"engine": "e", "replicas": "many"}, ["replicas", "many"][:1]),
        ({"engine": "e", "replicas": 0}, ["replicas", "0"]),
        ({"engine": "e", "spill_after": -1}, ["spill_after", "-1"]),
        ({"engine": "e", "replicas": 3, "max_replicas": 2}, ["max_replicas", "2", "3"]),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RayConfig.of(given)
    assert all(word in str(caught.value) for word in words)


def test_a_server_gets_what_is_said() -> None:
    config = RayConfig(
        engine="e", lora_dir="d", lora_root="r", lora_dir_refresh=0.5, max_num_seqs=3
    )
    server = config.server
    assert (server.directory, server.names) == (Path("e"), ["e"])
    assert (server.lora_dir, server.lora_roots) == (Path("d"), [Path("r")])
    assert (server.lora_dir_refresh_s, server.serving.rows) == (0.5, 3)
    guard = RayConfig(engine="e", api_key="k", admin_api_key="a", allowed_host="h").guard
    assert (guard.api_keys, guard.admin_key) == (["k"], "a")
    assert set(guard.allowed_hosts) == {"127.0.0.1", "localhost", "[::1]", "h"}


def test_adapters_of_the_start_and_folders_are_one_or_several() -> None:
    one = RayConfig(engine="e", lora_root="r", lora_modules="a=x/a").server
    assert (one.lora_roots, one.lora_modules) == ([Path("r"), Path("x/a")], [("a", "x/a", None)])
    modules = ["a=x", '{"name": "b", "path": "y", "base_model_name": "p"}']
    several = RayConfig(engine="e", lora_root=["r", "s"], lora_modules=modules).server
    assert several.lora_roots == [Path("r"), Path("s"), Path("x"), Path("y")]
    assert several.lora_modules == [("a", "x", None), ("b", "y", "p")]
    with pytest.raises(ConfigError, match="NAME=PATH"):
        _ = RayConfig(engine="e", lora_modules="a").server


def test_replicas_are_a_number_or_as_many_as_requests_need() -> None:
    fixed = RayConfig(engine="e", replicas=2).deployment(4)
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    scaled = RayConfig(engine="e", max_replicas=3).deployment(4)
    assert scaled["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 30.0,
        "downscale_delay_s": 600.0,
    }
    assert scaled["max_ongoing_requests"] > 4 * 9
