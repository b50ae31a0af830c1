"""Triton's model: requests of many adapters share a batch, each with its own answer or error."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.eventually import eventually
from support.fakes.fake_triton import FakeRequest
from support.fakes.gated_engine import GatedEngine
from support.fakes.slot_engine import POISON, expected_answer

from trt_lora.runtime import SamplingParams

MakeModel = Callable[..., Any]
FEW = {"max_tokens": 5, "sampling_parameters": '{"temperature": 0}'}


def request(prompt: list[int] | str, number: int = 0, /, **inputs: Any) -> FakeRequest:
    """A request for the adapter of a number, 0 for the base model; inputs have a batch of one."""
    given = {"text_input" if isinstance(prompt, str) else "input_ids": prompt, **FEW, **inputs}
    if number:
        given["lora_name"] = f"{number}.safetensors"
    return FakeRequest({name: _array(value) for name, value in given.items()})


def _array(value: Any) -> Any:
    if isinstance(value, str):
        return np.array([[value.encode()]], np.object_)
    array = np.array(value)
    return array.reshape(1, *(array.shape or (1,)))


def expected(prompt: list[int], number: int = 0, most: int = 5) -> list[int]:
    sampling = SamplingParams(max_tokens=most, temperature=0, stop_token_ids=(2,), ignore_eos=True)
    return [token for token in expected_answer(prompt, number, sampling) if token is not None]


def is_own(asked: FakeRequest, prompt: list[int], number: int = 0) -> bool:
    return not asked.error and asked.outputs("token_id") == expected(prompt, number)


def test_requests_of_more_adapters_than_slots_are_answered_as_alone(model: Any) -> None:
    asked = {number: request([5, 6, number], number) for number in (0, 1, 2, 3)}
    model.execute([asked[0], asked[1]])
    model.execute([asked[2], asked[3]])
    for number, each in asked.items():
        assert is_own(each, [5, 6, number], number)
        assert len(each.responses) == 1
        assert not each.ends_empty


def test_a_stream_is_a_response_for_each_token_and_an_empty_last_one(
    model: Any, gated: GatedEngine
) -> None:
    asked = request([5, 6], 1, stream=True)
    gated.shut()
    model.execute([asked])

    def is_told(steps: int) -> bool:
        return len(asked.responses) == steps

    def has_come(steps: int) -> bool:
        """Whether so many were made; the next one may be begun before a token is told."""
        return gated.steps == steps and len(asked.responses) >= steps - 1

    for steps in range(1, 6):
        gated.let(1)
        eventually(partial(is_told, steps), seconds=2)  # else two tokens may come as one
        assert eventually(partial(has_come, steps))
    assert is_own(asked, [5, 6], 1)
    assert asked.outputs("finish_reason") == [b"length"]
    assert len(asked.responses) == len(expected([5, 6], 1)) == 5
    assert asked.ends_empty
    (shape,) = {tensor.array.shape for each in asked.responses for tensor in each.output_tensors}
    assert shape == (1, 1)


def test_where_triton_is_slow_a_response_has_what_has_come_meanwhile(
    model: Any, gated: GatedEngine
) -> None:
    slow, other = request([5, 6], 1, stream=True), request([7])
    slow.may_send.clear()
    model.execute([slow, other])
    scheduler = model._loop._scheduler
    assert eventually(lambda: gated.steps >= 5 and not scheduler), "the engine waits for nobody"
    slow.may_send.set()
    assert is_own(slow, [5, 6], 1)
    assert 1 <= len(slow.responses) <= 3
    assert is_own(other, [7])


def test_a_stop_token_is_no_part_of_the_answer_and_its_reason_is_told(model: Any) -> None:
    first = expected([5])[0]
    for stream in (True, False):
        asked = request([5], stream=stream)
        asked.others = {"stop_token_ids": [first]}
        model.execute([asked])
        assert asked.outputs("finish_reason") == [b"stop"]
        assert asked.outputs("token_id") == []


def test_text_is_read_and_written_without_a_template(model: Any) -> None:
    text, ids = request("w5 w6", 1), request([5, 6], 1)
    pieces, both = request("w5 w6", 1, stream=True), request("w5 w6", exclude_input_in_output=False)
    model.execute([text, ids, pieces, both])
    assert is_own(text, [5, 6], 1)
    words = "".join(f" w{token}" for token in expected([5, 6], 1)).encode()
    assert text.outputs("text_output") == ids.outputs("text_output") == [words]
    assert b"".join(pieces.outputs("text_output")) == words
    assert both.outputs("text_output")[0].startswith(b"w5 w6 w")


def test_log_probabilities_are_json_for_each_token(model: Any) -> None:
    whole = request([5], sampling_parameters='{"temperature": "0", "logprobs": 2}')
    chosen = request([5], stream=True, return_log_probs=True)
    model.execute([whole, chosen])
    (text,) = whole.outputs("logprobs")
    listed = json.loads(text)
    for token, known in zip(expected([5]), listed, strict=True):
        assert len(known) == 2
        best = {"rank": 1, "decoded_token": f"w{token}"}
        assert {**best, "logprob": known[str(token)]["logprob"]} == known[str(token)]
    pieces = [known for each in chosen.outputs("logprobs") for known in json.loads(each)]
    assert [list(known) for known in pieces] == [[str(token)] for token in expected([5])]


def test_without_a_batch_outputs_have_no_dimension_of_it(make_model: MakeModel) -> None:
    asked = request([5])
    make_model(config={"max_batch_size": 0}).execute([asked])
    assert is_own(asked, [5])
    assert [t.array.shape for t in asked.responses[0].output_tensors] == [(1,), (5,), (1,)]


def test_a_request_that_fails_ends_with_its_error_and_no_other_does(model: Any) -> None:
    unknown = request([5], 7)
    poisoned, fine = request([5], POISON), request([5], 1)
    empty, beyond = request([]), request([9999])
    stray = request([5])
    stray.others = {"tempratur": 0}
    grammar = '{"structured_outputs": {"regex": "("}}'
    torn = request([5], sampling_parameters=grammar)
    model.execute([unknown, poisoned, empty, beyond, stray, torn, fine])
    for asked, words in (
        (unknown, "7.safetensors"),
        (poisoned, f"{POISON}.safetensors"),
        (empty, "is empty"),
        (beyond, "9999"),
        (stray, "'tempratur' is no sampling parameter"),
        (torn, "structured output"),
    ):
        assert words in asked.error
    assert is_own(fine, [5], 1)


def test_a_broken_engine_ends_every_request_and_later_ones_are_served(
    model: Any, gated: GatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("/models/engine is lost")

    with monkeypatch.context() as patch:
        patch.setattr(gated, "execute", broken)
        lost = [request([5], 1), request([6])]
        model.execute(lost)
        assert [each.error for each in lost] == ["the engine failed: RuntimeError"] * 2
    again = request([5], 1)
    model.execute([again])
    assert is_own(again, [5], 1)


def test_a_client_that_leaves_frees_its_row_for_who_waits(model: Any, gated: GatedEngine) -> None:
    gated.shut()
    leaving = [request([5, n], 1, stream=True, max_tokens=20) for n in (6, 7)]
    model.execute(leaving)
    assert eventually(lambda: gated.waits)
    waiting, gone = request([8], 2), request([9], 3)
    model.execute([waiting, gone])
    for each in (gone, *leaving):
        each.has_left = True
    assert all(eventually(each.ended.is_set) for each in (gone, *leaving)), "before another step"
    assert [each.responses for each in leaving] == [[], []]
    gated.let()
    assert is_own(waiting, [8], 2)
    assert model._responder.ended["abort"] == 3
    assert not model._responder.answers


def test_who_cannot_be_sent_a_response_is_let_go_of_and_no_other(model: Any) -> None:
    broken, fine = request([5], 1, stream=True), request([6], 1)
    broken.is_broken = True
    model.execute([broken, fine])
    assert "could not be sent" in broken.error
    assert is_own(fine, [6], 1)


def test_more_requests_than_may_wait_are_refused(make_model: MakeModel, gated: GatedEngine) -> None:
    model = make_model(max_queue="1", rows="1")
    gated.shut()
    held = [request([5]), request([6])]
    model.execute(held)
    late = request([7])
    model.execute([late])
    assert "2 requests run or wait" in late.error
    gated.let()
    assert [is_own(each, [5 + n]) for n, each in enumerate(held)] == [True, True]


def test_a_model_that_is_not_decoupled_answers_whole_and_refuses_streams(
    make_model: MakeModel,
) -> None:
    model = make_model(config={"model_transaction_policy": {"decoupled": False}})
    stream, whole = request([5], stream=True), request([5])
    model.execute([stream, whole])
    assert "decoupled: false" in stream.error
    assert is_own(whole, [5])


def test_its_threads_end_with_it_and_what_runs_is_told(
    make_model: MakeModel, gated: GatedEngine
) -> None:
    before = set(threading.enumerate())
    model = make_model()
    gated.shut()
    asked = request([5])
    model.execute([asked])
    assert eventually(lambda: gated.waits)
    ending = threading.Thread(target=model._open.close)
    ending.start()
    gated.let(1)
    assert "was closed" in asked.error
    ending.join()
    assert set(threading.enumerate()) <= before


def test_a_bad_parameter_does_not_load_the_model(make_model: MakeModel) -> None:
    with pytest.raises(Exception, match=r"parameter 'row' is unknown.*did you mean 'rows'"):
        make_model(row="2")


def test_the_model_needs_nothing_of_the_web() -> None:
    code = (
        "import sys; from support.fakes import fake_triton\n"
        "sys.modules['triton_python_backend_utils'] = fake_triton\n"
        "import trt_lora.runtime.scaleout.triton.model\n"
        "print({'starlette', 'uvicorn', 'prometheus_client', 'zmq'} & sys.modules.keys())"
    )
    tests = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tests, check=True, capture_output=True, text=True
    )
    assert ran.stdout == "set()\n"
