"""Frames between the web and the engine: whole however they are cut, and equal when they arrive."""

import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_lora.plugins import errors
from trt_lora.plugins.errors import BackendError, LoRAError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.token import Logprob, Token
from trt_lora.runtime.server.engine_process import wire
from trt_lora.runtime.server.engine_process.engine_client import _changed
from trt_lora.runtime.server.engine_process.engine_side import _sampling

SAMPLING = SamplingParams(
    n=3,
    seed=(1 << 64) - 1,
    stop=["w1", "end\n"],
    stop_token_ids=[5, 6],
    logit_bias={3: -100.0, 96: 0.5},
    structured_outputs=StructuredOutputsParams(json={"type": "object", "required": ["x"]}),
)
COMMANDS: list[wire.Command] = [
    wire.Open("/engine", "auto", {"rows": 3}, {"host_memory": None}),
    wire.Submit(7, [[1, 2], [3]], [5, 6], _changed(SAMPLING), "a", {}, "client", None),
    wire.Submit(8, [[1]], [4], {}, None, {"a": 0.5, "b": -1.0}, None, "salt"),
    wire.Cancel([1, 1 << 40]),
    wire.Ask(9, "load", {"name": "é", "replace": False, "max_rank": None}),
    wire.Close(),
]
TOKENS = [
    Token(1, 5, None, "Lis", {5: Logprob(-0.25, 1), 9: Logprob(-3.5, 2)}),
    Token(2, None, "stop", "", stop_reason="end"),
    Token(3, None, "stop", "", {6: Logprob(-0.5, 1)}, stop_reason=6, stop_token=6),
    Token(4, 7, "length", "x", prompt_logprobs=(None, {2: Logprob(-1.0, 4)})),
]
EVENTS: list[wire.Event] = [
    wire.Accepted(7, (1, 2, 3)),
    wire.Answer(7),
    wire.Answer(9, {"name": "a", "bytes": 1 << 40, "warnings": ["w"]}),
    wire.Failed(8, wire.WireError("ConfigError", "n is 0")),
    wire.Step(
        TOKENS,
        {5: wire.WireError("OutputError", "NaN")},
        running=2,
        waiting=9,
        times={
            4: wire.RequestTimes(3, 2, 0.5, 0.25, 1.0, 0.0),
            5: wire.RequestTimes(None, 0, 1, 0, 0, 0),
        },
    ),
]
LORA_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LoRAError)
]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The bytes, cut at these places."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def framed(messages: Iterable[wire.Command | wire.Event]) -> bytes:
    """The bytes of messages; lists and tuples are one there."""
    return b"".join(map(wire.framed, messages))


def test_every_kind_of_message_is_tried() -> None:
    tried = {type(message) for message in (*COMMANDS, *EVENTS)}
    assert tried == {*get_args(wire.Command), *get_args(wire.Event)}


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_messages_arrive_equal_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    sent = framed(COMMANDS)
    frames, found = wire.Frames(), list[wire.Command]()
    for piece in pieces(sent, cuts):
        found += frames.commands(piece)
    assert framed(found) == framed(COMMANDS)
    sent = framed(EVENTS)
    frames, events = wire.Frames(), list[wire.Event]()
    for piece in pieces(sent, cuts):
        events += frames.events(piece)
    assert events == EVENTS


def test_a_message_comes_with_its_last_byte_and_not_before() -> None:
    frames, sent = wire.Frames(), wire.framed(EVENTS[-1])
    assert [frames.events(sent[i : i + 1]) for i in range(len(sent) - 1)] == [[]] * (len(sent) - 1)
    assert frames.events(sent[-1:]) == EVENTS[-1:]


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        SamplingParams(),
        SamplingParams(temperature=0, max_tokens=1, skip_special_tokens=False),
        replace(SAMPLING, structured_outputs=StructuredOutputsParams(regex="a+"), stop="x"),
        replace(SAMPLING, structured_outputs=StructuredOutputsParams(grammar='start: "é"')),
        SamplingParams(logprobs=0, prompt_logprobs=-1, bad_words=["no"], allowed_token_ids=[4]),
    ],
)
def test_parameters_arrive_equal(sampling: SamplingParams) -> None:
    sent = wire.framed(wire.Submit(1, [[1]], [7], _changed(sampling), None, {}, None, None))
    (arrived,) = wire.Frames().commands(sent)
    assert isinstance(arrived, wire.Submit)
    assert _sampling(arrived.sampling, arrived.max_tokens[0]) == replace(sampling, max_tokens=7)


def test_parameters_at_their_defaults_take_no_room() -> None:
    assert _changed(SamplingParams()) == {}
    assert _changed(SamplingParams(top_k=4)) == {"top_k": 4}


def _sent(error: BaseException) -> LoRAError:
    sent = wire.framed(wire.Failed(1, wire.WireError.of(error)))
    (arrived,) = wire.Frames().events(sent)
    assert isinstance(arrived, wire.Failed)
    return arrived.error.error()


@pytest.mark.parametrize("kind", LORA_ERRORS)
def test_an_error_of_ours_arrives_as_the_same_class_with_the_same_words(kind: Any) -> None:
    arrived = _sent(kind("adapter 'é' is missing"))
    assert type(arrived) is kind
    assert str(arrived) == "adapter 'é' is missing"


def test_another_error_tells_its_class_alone() -> None:
    for error in (ValueError("secret of a prompt"), MemoryError(), KeyError("secret")):
        arrived = _sent(error)
        assert type(arrived) is BackendError
        assert str(arrived) == f"the engine failed: {type(error).__name__}"


def test_events_leave_in_their_order_and_all_of_them_before_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = wire.EngineChannel(theirs)
        ours.sendall(framed(COMMANDS))
        ours.shutdown(socket.SHUT_WR)
        assert framed(channel.commands()) == framed(COMMANDS)
        for event in EVENTS * 100:
            channel.send(event)
        closing = threading.Thread(target=channel.close)  # it waits until all have left
        closing.start()
        frames, found = wire.Frames(), list[wire.Event]()
        while data := ours.recv(1000):
            found += frames.events(data)
        closing.join()
    assert found == EVENTS * 100


def test_who_reads_late_finds_all_events_in_order_and_nobody_has_waited() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = wire.EngineChannel(theirs)
        sent = [wire.Answer(number, "x" * 10_000) for number in range(300)]
        for event in sent[:200]:  # more than a socket holds, and nobody reads
            channel.send(event)
        frames, found = wire.Frames(), list[wire.Event]()
        while len(found) < 200:
            found += frames.events(ours.recv(100_000))
        for event in sent[200:]:
            channel.send(event)
        closing = threading.Thread(target=channel.close)
        closing.start()
        while data := ours.recv(100_000):
            found += frames.events(data)
        closing.join()
    assert found == sent


def test_an_other_end_that_is_gone_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    channel = wire.EngineChannel(theirs)
    ours.close()
    for _ in range(100):
        channel.send(wire.Answer(1, "x" * 10_000))
    assert list(channel.commands()) == []
    channel.close()
