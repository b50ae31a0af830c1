"""The engine's half of a server: whose turn it is when steps and loads want the processor."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from support.served_engines import Spoken
from support.web_server import web_server

from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_threads_that_read_adapters_give_way_to_steps_and_no_other_does(
    spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, own = [], os.getpriority(os.PRIO_PROCESS, 0)
    real = AdapterDesk.answer

    def answer(desk: AdapterDesk, what: str, options: Mapping[str, Any]) -> Any:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))  # of this thread
        return real(desk, what, options)

    monkeypatch.setattr(AdapterDesk, "answer", answer)
    with web_server(spoken.config()) as web:
        web.client.get("/v1/lora_adapters")
        others = {int(task) for task in os.listdir("/proc/self/task")}
        niced = [t for t in others if os.getpriority(os.PRIO_PROCESS, t) > own]
    assert found
    assert set(found) == {min(own + 10, 19)}
    assert 0 < len(niced) <= len(found)
