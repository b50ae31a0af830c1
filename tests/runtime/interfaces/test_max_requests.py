"""MAX's requests over ZeroMQ: every one is answered, and none ends the server."""

import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from support.adapters.many_adapters import adapter_file, slot_adapters
from support.eventually import eventually

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.interfaces.max import LoRAConfig, LoRAManager, LoRAOutcome, LoRAStatus
from trt_lora.runtime.interfaces.max.request_sockets import MAX_MESSAGE_BYTES
from trt_lora.runtime.interfaces.max.requests import (
    MAX_REQUEST_BYTES,
    MOST_WAITING,
    LoRARequestProcessor,
)


class Client:
    """What MAX's server does at the other end: sends by a socket it binds, and reads answers."""

    def __init__(self, base: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.requests, self.answers = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self.requests.setsockopt(zmq.SNDTIMEO, 10_000)  # an error instead of a test that hangs
        self.requests.bind(f"{base}-lora_request")
        self.answers.connect(f"{base}-lora_response")

    def send(self, message: object) -> None:
        self.requests.send(msgspec.msgpack.encode(message))

    def answer(self, server: LoRAManager | LoRARequestProcessor) -> Any:
        """The next answer, while the server does its part."""
        found: list[Any] = []

        def arrived() -> bool:
            server.process_lora_requests()
            if self.answers.poll(1):
                found.append(msgspec.msgpack.decode(self.answers.recv()))
            return bool(found)

        assert eventually(arrived)
        return found[0]

    def close(self) -> None:
        self.requests.close(linger=0)
        self.answers.close(linger=0)


@pytest.fixture
def base() -> Iterator[str]:
    """An address in a folder of its own, with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/max"


@pytest.fixture
def client(base: str) -> Iterator[Client]:
    made = Client(base)
    yield made
    made.close()


@pytest.fixture
def server(base: str, tmp_path: Path) -> Iterator[LoRAManager]:
    config = LoRAConfig(enable_lora=True, allowed_roots=(tmp_path / "allowed",))
    (tmp_path / "allowed").mkdir()
    made = LoRAManager(config, slot_adapters(), zmq_endpoint_base=base)
    yield made
    made.close()
    made.adapters.check_integrity()


def load(path: object, name: str = "a") -> dict[str, object]:
    return {"operation": "load", "lora_name": name, "lora_path": path}


def test_an_adapter_is_loaded_and_unloaded_by_request(
    client: Client, server: LoRAManager, tmp_path: Path
) -> None:
    path = str(adapter_file(tmp_path / "allowed", "a"))
    client.send(["1", load(path)])
    expected = {"status": "success", "message": "adapter 'a' is loaded"}
    assert client.answer(server) == ["1", expected]
    assert server.loras == ["a"]
    client.send(["2", {"operation": "unload", "lora_name": "a"}])
    assert client.answer(server)[1]["status"] == "success"
    client.send(["3", {"operation": "unload", "lora_name": "a"}])
    assert client.answer(server)[1]["status"] == "unload_name_nonexistent"


def test_a_message_is_messagepack_as_it_is_written_down(
    client: Client, server: LoRAManager
) -> None:
    operation = b"\xa9operation\xa6unload"
    client.requests.send(b"\x92\xa17\x82" + operation + b"\xa9lora_name\xa1x")
    server_answer = b"\x92\xa17\x82\xa6status\xb7unload_name_nonexistent\xa7message"
    server.process_lora_requests()

    def arrived() -> bool:
        server.process_lora_requests()
        return bool(client.answers.poll(1))

    assert eventually(arrived)
    assert client.answers.recv().startswith(server_answer)


def test_an_id_of_any_kind_comes_back_as_it_was(client: Client, server: LoRAManager) -> None:
    for request_id in ({"value": "a"}, 7, None, "x" * 1000):
        client.send([request_id, {"operation": "unload", "lora_name": "a"}])
        assert client.answer(server)[0] == request_id


def test_a_path_outside_of_the_allowed_folders_is_refused(
    client: Client, server: LoRAManager, tmp_path: Path
) -> None:
    outside = adapter_file(tmp_path, "a")
    (tmp_path / "allowed" / "link.safetensors").symlink_to(outside)
    (tmp_path / "allowed-too").mkdir()
    beside = adapter_file(tmp_path / "allowed-too", "a")
    paths = (outside, beside, tmp_path / "allowed/../a.safetensors", "a.safetensors", "", None)
    for path in (*map(str, paths[:-1]), None, f"{tmp_path}/allowed/link.safetensors", "/\0"):
        client.send(["1", load(path)])
        assert client.answer(server)[1]["status"] == "load_invalid_path", path
    assert server.loras == []


@pytest.mark.parametrize(
    "message",
    [
        ["1", load("/a") | {"more": 1}],
        ["1", load(3)],
        ["1", {"operation": "list", "lora_name": "a"}],
        ["1", {"operation": "load"}],
        ["1", "load"],
        ["1", load("x" * MAX_REQUEST_BYTES)],
    ],
    ids=["unknown field", "wrong type", "unknown operation", "no name", "no map", "oversized"],
)
def test_what_is_no_request_is_answered_with_its_id(
    client: Client, server: LoRAManager, message: object
) -> None:
    client.send(message)
    request_id, answer = client.answer(server)
    assert request_id == "1"
    assert answer["status"] == "unspecified_error"
    assert answer["message"].startswith("this is no request: ")


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x91\xa11"],
        [b"\x91" * 50_000],
        [b"\x92\xa11" + b"\x91" * 50_000],
        [b"\x92\xa2\xff\xff\x80"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x92\xa11\x80", b""],
    ],
    ids=["empty", "unused byte", "one part", "nested", "nested body", "no text", "long", "frames"],
)
def test_what_is_no_message_is_answered_and_the_next_one_is_served(
    client: Client, server: LoRAManager, frames: list[bytes]
) -> None:
    client.requests.send_multipart(frames)
    assert client.answer(server)[1]["status"] == "unspecified_error"
    client.send(["2", {"operation": "unload", "lora_name": "a"}])
    assert client.answer(server)[1]["status"] == "unload_name_nonexistent"


def test_a_message_beyond_all_limits_ends_its_connection_and_the_next_one_is_served(
    client: Client, server: LoRAManager
) -> None:
    client.requests.send(bytes(MAX_MESSAGE_BYTES + 1))

    def served() -> bool:
        server.process_lora_requests()
        if client.requests.poll(10, zmq.POLLOUT):  # it is connected, or not yet cut off
            client.send(["2", {"operation": "unload", "lora_name": "a"}])
        return bool(client.answers.poll(10))

    assert eventually(served, 10)
    assert msgspec.msgpack.decode(client.answers.recv())[0] == "2"


def test_every_damaged_message_has_an_answer(client: Client, server: LoRAManager) -> None:
    rng = np.random.default_rng(0)
    whole = msgspec.msgpack.encode(["1", load("/a")])
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        client.requests.send(bytes(damaged[: rng.integers(1, len(whole) + 1)]))
        assert client.answer(server)[1]["status"] != "success"
    assert server.loras == []


def test_without_the_extra_the_message_says_what_to_install(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoRAConfig(enable_lora=True)
    for missing in ("msgspec", "zmq"):
        with monkeypatch.context() as without:
            for name in ("requests", "request_sockets"):
                without.delitem(sys.modules, f"trt_lora.runtime.interfaces.max.{name}")
            without.setitem(sys.modules, missing, None)
            with pytest.raises(ConfigError, match=r"pip install 'trt-lora\[requests\]'"):
                LoRAManager(config, slot_adapters(), zmq_endpoint_base=base)


def test_a_client_that_starts_again_is_served(
    base: str, client: Client, server: LoRAManager
) -> None:
    for number in range(3):
        client.send([number, {"operation": "unload", "lora_name": "a"}])
        assert client.answer(server)[0] == number
        client.close()
        client = Client(base)
    client.close()


class Slow:
    """Operations that wait to be let on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def load(self, name: str, path: str) -> LoRAOutcome:
        self.go_on.wait(10)
        if name == "defect":
            raise RuntimeError("a secret path")
        return LoRAOutcome(LoRAStatus.SUCCESS, name)

    def unload(self, name: str) -> LoRAOutcome:
        return self.load(name, "")


@pytest.fixture
def slow(base: str) -> Iterator[tuple[Slow, LoRARequestProcessor]]:
    operations = Slow()
    made = LoRARequestProcessor(operations.load, operations.unload, base, ["/"], timeout_s=0.05)
    yield operations, made
    operations.go_on.set()
    made.close()


def test_an_operation_that_takes_too_long_is_answered_once_and_goes_on(
    client: Client, slow: tuple[Slow, LoRARequestProcessor]
) -> None:
    operations, processor = slow
    client.send(["1", load("/a")])
    answer = client.answer(processor)
    assert answer[1]["status"] == "load_error"
    assert "longer than 0.05 s and goes on; ask again" in answer[1]["message"]
    operations.go_on.set()
    client.send(["2", load("/a", "b")])
    assert client.answer(processor) == ["2", {"status": "success", "message": "b"}]


def test_a_defect_is_answered_without_its_text_and_logged(
    client: Client, slow: tuple[Slow, LoRARequestProcessor], caplog: pytest.LogCaptureFixture
) -> None:
    operations, processor = slow
    operations.go_on.set()
    client.send(["1", load("/a", "defect")])
    answer = client.answer(processor)[1]
    assert answer == {
        "status": "load_error",
        "message": "RuntimeError; the server's log says more",
    }
    assert "a secret path" in caplog.text


def test_answers_that_nobody_fetches_are_bounded(
    base: str, slow: tuple[Slow, LoRARequestProcessor], caplog: pytest.LogCaptureFixture
) -> None:
    processor = slow[1]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    requests = context.socket(zmq.PUSH)
    requests.setsockopt(zmq.SNDTIMEO, 10_000)
    requests.bind(f"{base}-lora_request")
    try:
        sent = 0

        def overflowed() -> bool:
            nonlocal sent
            requests.send(b"\xc1")
            sent += 1
            processor.process_lora_requests()
            return "the oldest is dropped" in caplog.text

        assert eventually(overflowed)
        assert sent > MOST_WAITING
        assert len(processor._answers) == MOST_WAITING
    finally:
        requests.close(linger=0)


def test_the_socket_of_answers_is_its_users_alone(base: str, server: LoRAManager) -> None:
    path = Path(base.removeprefix("ipc://") + "-lora_response")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:5555", "tcp://127.0.0.1:5555", "", "ipc://", "ipc://relative", "ipc:///none/a"],
)
def test_an_address_that_others_could_reach_or_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"other machines|no absolute path in a folder"):
        LoRARequestProcessor(Slow().load, Slow().unload, address, [])


def test_a_file_is_not_replaced_by_a_socket_and_a_long_path_is_refused(base: str) -> None:
    path = Path(base.removeprefix("ipc://") + "-lora_response")
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        LoRARequestProcessor(Slow().load, Slow().unload, base, [])
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="is longer than"):
        LoRARequestProcessor(Slow().load, Slow().unload, base + "x" * 200, [])
