"""Adapters are unloaded, replaced and changed while requests wait for them and use them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.adapter_routes import GREEDY, KNOWN, PROMPT, SAMPLING, load, names, said, unload
from support.eventually import eventually
from support.fakes.slot_engine import expected_answer, number_file
from support.served_engines import Gated, MakeGated, Spoken, write_adapter
from support.web_server import COMPLETIONS, refused, web_server

from trt_lora.runtime.manifest import Manifest


def both_run(gated: Gated) -> bool:
    """Whether adapters 1 and 2 answer, after one step more."""
    gated.engine.let(1)
    return all(gated.web.client.get(f"{KNOWN}/{name}").json()["running"] for name in "12")


def asked(gated: Gated, pool: ThreadPoolExecutor, model: str) -> Any:
    body = {"prompt": PROMPT, "model": model, "return_token_ids": True, **GREEDY}
    client = gated.web.running.client
    before = len(client)
    future = pool.submit(gated.web.post, COMPLETIONS, **body)
    assert eventually(lambda: len(client) > before)  # the engine has it
    return future


def test_unloading_waits_for_those_that_still_answer_where_that_is_asked_for(
    make_gated: MakeGated, tmp_path: Path
) -> None:
    gated = make_gated()
    with ThreadPoolExecutor() as pool:
        for name in "12":  # they have slots
            said(gated.web, name)
        gated.engine.shut()
        answers = [asked(gated, pool, name) for name in "12"]
        assert eventually(lambda: both_run(gated))
        freed = pool.submit(unload, gated.web, "1", wait=True)
        assert unload(gated.web, "2").status_code == 200  # without a wait
        assert eventually(lambda: names(gated.web) == ["base", "3"])
        assert not freed.done()
        path = number_file(tmp_path, 4)
        error = refused(load(gated.web, "1", path), 409)  # at once
        assert "'1' is being unloaded" in error["message"]
        refused(unload(gated.web, "1"), 404)
        assert load(gated.web, "2", path).status_code == 200
        assert unload(gated.web, "2").status_code == 200
        gated.engine.let()
        assert freed.result().status_code == 200
        for number, answer in zip((1, 2), answers, strict=True):  # who runs ends as it began
            assert answer.result().status_code == 200, answer.result().text
            ids = answer.result().json()["choices"][0]["token_ids"]
            assert ids == expected_answer(PROMPT, number, SAMPLING)
        assert names(gated.web) == ["base", "3"]
        assert load(gated.web, "1", path).status_code == 200


def test_who_waits_for_an_adapter_that_is_unloaded_is_told_so(make_gated: MakeGated) -> None:
    gated = make_gated(rows=1)
    with ThreadPoolExecutor() as pool:
        gated.engine.shut()
        first, second = asked(gated, pool, "base"), asked(gated, pool, "3")
        assert unload(gated.web, "3").status_code == 200
        gated.engine.let()
        assert first.result().status_code == 200
        error = refused(second.result(), 404)
        assert (error["param"], "'3'" in error["message"]) == ("model", True)


def test_who_waits_for_an_adapter_that_is_replaced_has_the_new_one(
    make_gated: MakeGated, tmp_path: Path
) -> None:
    gated = make_gated(rows=1)
    with ThreadPoolExecutor() as pool:
        gated.engine.shut()
        first, second = asked(gated, pool, "base"), asked(gated, pool, "3")
        path = number_file(tmp_path, 4)
        assert load(gated.web, "3", path, load_inplace=True).status_code == 200
        gated.engine.let()
        assert first.result().status_code == 200
        ids = second.result().json()["choices"][0]["token_ids"]
        assert ids == expected_answer(PROMPT, 4, SAMPLING)


def test_logits_that_are_no_numbers_end_one_request_and_not_its_neighbours(
    make_gated: MakeGated, tmp_path: Path
) -> None:
    gated = make_gated()
    path = number_file(tmp_path, 90)  # it answers with NaN
    assert load(gated.web, "bad", path).status_code == 200
    with ThreadPoolExecutor() as pool:
        gated.engine.shut()
        good, bad = asked(gated, pool, "1"), asked(gated, pool, "bad")
        gated.engine.let()
        ids = good.result().json()["choices"][0]["token_ids"]
        assert ids == expected_answer(PROMPT, 1, SAMPLING)
        error = refused(bad.result(), 500)
    assert "bad" in error["message"]
    (event,) = gated.web.events(COMPLETIONS, prompt=PROMPT, model="bad")
    assert event["error"]["code"] == 500


def test_files_that_have_changed_since_they_were_loaded_are_a_conflict(
    spoken: Spoken, manifest: Manifest, place: Path
) -> None:
    """They were let go of, and would be read again."""
    modules = [
        (f"x{n}", str(write_adapter(place / f"x{n}", manifest, rank=16, seed=n))) for n in range(4)
    ]
    with web_server(spoken.config(lora_modules=modules, max_cpu_loras=1, max_loras=1)) as web:
        for name, _ in modules[::-1]:
            said(web, name)
        levels = {k["name"]: k["level"] for k in web.client.get(KNOWN).json()["data"]}
        gone = next(name for name, level in levels.items() if level == "disk")
        write_adapter(place / gone, manifest, rank=16, seed=9)
        error = web.refusal(COMPLETIONS, 409, prompt=PROMPT, model=gone)
        assert error["type"] == "ConflictError"
        assert str(place) not in error["message"]
