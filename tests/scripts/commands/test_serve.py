"""`trt-lora serve` as a command: how it starts, what it refuses, and how its processes end."""

import argparse
import dataclasses
import json
import os
import signal
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from conftest import TinyEngine
from support.commands import trt_lora
from support.eventually import eventually
from support.served_engines import write_adapter
from support.served_process import Started, children, started
from support.spoken_engine import spoken_engine

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.server import draining_server
from trt_lora.runtime.server.adapters.served_models import NamedPath
from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.draining_server import WebConfig
from trt_lora.runtime.server.log_lines import LogConfig
from trt_lora.scripts.commands.serve import _config, _count, add_options

BODY = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def spoken(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with slots and words, an adapter beside it."""
    folder = tmp_path_factory.mktemp("spoken")
    engine = spoken_engine(tiny_engine.slots, folder / "engine")
    write_adapter(folder / "a", read_manifest(engine))
    return engine


@pytest.mark.slow
def test_it_answers_and_a_signal_ends_it_with_its_engine(spoken: Path) -> None:
    words = ("--drain-grace", "0", "--lora-modules", f"a={spoken.with_name('a')}")
    with started(spoken, *words, "--served_model_name", "base", "--enforce-eager") as server:
        assert eventually(server.is_ready)
        models = server.client.get("/v1/models").json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [
            ("base", None),
            ("a", "base"),
        ]
        texts = {
            name: server.client.post("/v1/completions", json={**BODY, "model": name}).json()
            for name in ("base", "a")
        }
        assert texts["base"]["choices"][0]["text"] != texts["a"]["choices"][0]["text"]
        assert server.client.post("/v1/load_lora_adapter", json={}).status_code == 404
        engine = server.engine
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert not Path(f"/proc/{engine}").exists()
        lines = server.log.splitlines()
        warned, *told = [line for line in lines if "model.layers" not in line]
        assert warned.startswith("warning: --enforce-eager has no effect")
        assert [line.split(" ")[1] == "INFO" for line in told] == [True] * 5
        assert f" listens at {str(server.client.base_url).rstrip('/')}" in told[1]
        assert [line.count(" status=200 ") for line in lines if " path=/v1/comp" in line] == [1, 1]


@pytest.mark.slow
def test_an_engine_that_is_killed_ends_every_answer_and_the_server(spoken: Path) -> None:
    with started(spoken, "--log-format", "json", "--log-level", "DEBUG") as server:
        assert eventually(server.is_ready)
        engine = server.engine
        os.kill(engine, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.client.post, "/v1/completions", json=BODY)
            assert eventually(lambda: server.client.get("/load").json() == {"server_load": 1})
            os.kill(engine, signal.SIGKILL)
            assert answer.result().status_code == 503
        assert server.client.get("/health").status_code == 503
        assert server.process.wait(60) == 70
        lines = [json.loads(line) for line in server.log.splitlines()]
        (told,) = [line for line in lines if line.get("path") == "/v1/completions"]
        assert (told["message"], told["status"]) == ("request", 503)
        assert told["error"] == "ServiceUnavailableError"
        assert any(" runs on ONNX Runtime (CPU)" in line["message"] for line in lines)
        assert {"/ready", "/load", "/health"} <= {line.get("path") for line in lines}  # DEBUG's


@contextmanager
def held(server: Started) -> Iterator[Future[str]]:
    """A stream of an engine that is stopped, and goes on in the end if it is still there."""

    def streamed() -> str:
        body = {**BODY, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            return response.read().decode()

    assert eventually(server.is_ready)
    engine = server.engine
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        try:
            stream = pool.submit(streamed)
            assert eventually(lambda: server.client.get("/load").json() == {"server_load": 1})
            yield stream
        finally:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)


@pytest.mark.slow
def test_an_answer_under_way_ends_whole_after_a_signal(spoken: Path) -> None:
    with started(spoken, "--drain-grace", "0") as server:
        with held(server) as stream:
            server.process.terminate()
            assert eventually(lambda: not server.is_ready())
        events = stream.result().split("\n\n")
        assert '"finish_reason":"length"' in events[-3]
        assert events[-2:] == ["data: [DONE]", ""]
        assert server.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "signals"),
    [(("--drain-grace", "0", "--shutdown-timeout", "0.2"), 1), (("--drain-grace", "600"), 2)],
    ids=["in time", "at once"],
)
def test_a_signal_ends_it_though_its_engine_hangs(
    spoken: Path, options: tuple[str, ...], signals: int
) -> None:
    with started(spoken, *options) as server, held(server) as stream:
        for _ in range(signals):
            server.process.terminate()
            assert eventually(lambda: not server.is_ready())  # it has noticed
        assert server.process.wait(30) == 0
        assert '"code":503' in stream.result()
        assert "Traceback" not in server.log


def runs_engine(pid: int) -> bool:
    """Whether a process is the engine's; at first it is its parent's copy, and that waits."""
    return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_signal_ends_it_while_its_engine_is_opened(spoken: Path) -> None:
    with started(spoken) as server:
        assert eventually(lambda: any(map(runs_engine, children(server.process.pid))))
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGSTOP)  # as one that reads weights for minutes
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert not Path(f"/proc/{engine}").exists()
        assert all(" INFO " in line for line in server.log.splitlines())


@pytest.mark.slow
def test_https_behind_a_proxy_that_strips_a_path(spoken: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = "req -x509 -newkey rsa:2048 -nodes -subj /CN=a -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *made.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    words = ("--ssl-keyfile", key, "--ssl-certfile", certificate, "--root-path", "/llm")
    with started(spoken, *words, "--api-key", "planted") as plain:
        url = str(plain.client.base_url).replace("http:", "https:")
        trust = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=url, verify=trust, timeout=60) as client:
            server = dataclasses.replace(plain, client=client)
            assert eventually(server.is_ready)
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer planted"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert not plain.is_ready()  # without TLS


@pytest.mark.slow
def test_what_keeps_it_from_starting_is_the_last_line(spoken: Path, tmp_path: Path) -> None:
    with started(spoken, "--lora-modules", f"x={tmp_path}", "--drain-grace", "0") as server:
        assert server.process.wait(60) == 2
        *_, line = server.log.splitlines()
        assert line.startswith("error: --lora-modules x: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, which others reach: give --api-key"),
        (
            ["--host", "::", "--api-key", "k", "--allow-runtime-lora-updating"],
            "adapters may be loaded over HTTP: give --admin-api-key",
        ),
        (["--max-model-len", "1M"], "--max-model-len is 1048576, expected 1 to 64"),
        (["--max-num-seqs", "5"], "--max-num-seqs is 5, expected 1 to 4"),
        (["--max-lora-rank", "64"], "--max-lora-rank is 64, expected 1 to 16"),
        (["--max-loras", "3"], "--max-loras is 3, expected 1 to 2"),
        (["--dtype", "half"], "--dtype is half, and the engine was built for float32"),
        (["--lora-modules", "a"], "--lora-modules has 'a', expected NAME=PATH"),
        *(
            ([option, value], f"{option} is {value}")
            for option, value in (
                *(("--max-num-queued-reqs", "-5"), ("--max-num-queued-tokens", "-2")),
                *(("--queue-timeout", "-1.0"), ("--queue-timeout", "nan")),
                *(("--max-client-requests", "0"), ("--drain-grace", "-1.0")),
                *(("--shutdown-timeout", "nan"), ("--max-logprobs", "-5")),
                *(("--stream-interval", "0"), ("--sse-keep-alive-interval", "-1.0")),
                *(("--port", "99999"), ("--max-cpu-loras", "0")),
            )
        ),
        (["--max-loras", "2", "--max-cpu-loras", "1"], "--max-cpu-loras is 1, expected"),
        (["-tp", "2"], "--tensor-parallel-size 2 is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    spoken: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in trt_lora(capsys, "serve", spoken, *words, expected=2)


def test_numbers_and_adapters_are_spelled_as_in_vllm() -> None:
    assert [_count(text) for text in ("7", "2k", "1.5K", "auto", "-1")] == [
        7,
        2000,
        1536,
        None,
        None,
    ]
    assert NamedPath.of("a=b=c") == ("a", "b=c", None)
    assert NamedPath.of('{"name": "a", "path": "b", "base_model_name": "m"}') == ("a", "b", "m")
    for wrong in ("a", "{", '{"name": "a"}', "{}"):
        with pytest.raises(ConfigError, match="expected NAME=PATH"):
            NamedPath.of(wrong)


def test_no_option_is_abbreviated() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["engine", "--max-num-seq", "3"])


@pytest.mark.parametrize(
    ("words", "environment", "updates", "folder", "repos"),
    [
        ([], {}, True, None, []),
        (["--lora-dir", "x", "--lora-hub-repos", "o/a", "o/b"], {}, False, "x", ["o/a", "o/b"]),
        ([], {"VLLM_PLUGINS": "other"}, True, None, []),
        ([], {"VLLM_PLUGINS": "lora_filesystem_resolver"}, True, "v", []),
        ([], {"VLLM_PLUGINS": "a,lora_hf_hub_resolver"}, True, None, ["o/v", "o/w"]),
        ([], {}, True, "v", ["o/v", "o/w"]),  # all plugins
        ([], {}, False, None, []),  # vLLM does not ask them either
        (["--lora-dir", "x"], {}, True, "x", ["o/v", "o/w"]),
    ],
)
def test_where_adapters_are_looked_for_is_said_by_options_or_as_for_vllm(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environment: dict[str, str],
    updates: bool,
    folder: str | None,
    repos: list[str],
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if words != [] or environment or not updates or folder:
        monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", "v")
        monkeypatch.setenv("VLLM_LORA_RESOLVER_HF_REPO_LIST", "o/v, o/w")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_options(parser)
    config = _config(parser.parse_args(["engine", *words]), updates=updates)
    assert config.lora_dir == (Path(folder) if folder else None)
    assert list(config.hub_repos) == repos
    assert config.lora_dir_refresh_s == 5.0


def test_how_often_a_folder_is_looked_at_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(["engine", "--lora-dir", "x", "--lora-dir-refresh", "0.5"])
    assert _config(args, updates=False).lora_dir_refresh_s == 0.5


@pytest.mark.parametrize("shows", [True, False])
def test_the_page_is_left_out_where_that_is_asked_for(
    spoken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shows: bool
) -> None:
    paths = set[str]()

    def serve(server: Server, web: WebConfig, log: LogConfig) -> int:
        del web, log
        paths.update(route.path for route in server._routes())
        return 0

    monkeypatch.setattr(draining_server, "serve", serve)
    trt_lora(capsys, "serve", spoken, *([] if shows else ["--no-page"]))
    assert "/v1/models" in paths
    assert (("/" in paths), ("/page/page.js" in paths)) == (shows, shows)
