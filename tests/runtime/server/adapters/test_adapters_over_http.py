"""Adapters are loaded, replaced, pinned and unloaded over HTTP, in vLLM's words."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.adapter_routes import (
    GREEDY,
    KNOWN,
    LOAD,
    PROMPT,
    SAMPLING,
    UNLOAD,
    load,
    loaded,
    names,
    said,
    unload,
)
from support.served_engines import Spoken, write_adapter
from support.web_server import CHATS, COMPLETIONS, Web, refused, web_server

from trt_lora.runtime import Engine
from trt_lora.runtime.manifest import Manifest


@pytest.fixture(autouse=True)
def _others_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has loaded is gone after it."""
    yield
    if "web" in request.fixturenames:
        web: Web = request.getfixturevalue("web")
        for name in names(web)[3:]:
            unload(web, name)
        for name in "ab":
            web.client.post(f"{KNOWN}/{name}/unpin")


def test_an_adapter_comes_and_goes_in_vllms_words(web: Web, spoken: Spoken, twin: Engine) -> None:
    response = load(web, "sql", spoken.adapters["b"])
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'sql' added successfully."
    assert names(web) == ["base", "a", "b", "sql"]
    (answer,) = twin.generate([PROMPT], adapter="b", sampling=SAMPLING)
    assert said(web, "sql") == list(answer.token_ids)
    error = refused(load(web, "sql", spoken.adapters["a"]), 400)
    assert error["type"] == "InvalidUserInput"
    assert error["message"] == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )
    response = unload(web, "sql", lora_int_id=None)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'sql' removed successfully."
    assert names(web) == ["base", "a", "b"]
    error = refused(unload(web, "sql"), 404)
    assert error["type"] == "NotFoundError"
    assert error["message"] == "The lora adapter 'sql' cannot be found."
    assert web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="sql")["param"] == "model"


def test_models_are_listed_as_vllm_does(web: Web, spoken: Spoken) -> None:
    base, first, _ = web.client.get("/v1/models").json()["data"]
    assert base["root"] == str(spoken.engine)
    assert (base["parent"], base["max_model_len"], base["object"]) == (None, 64, "model")
    assert first["root"] == str(spoken.adapters["a"])
    assert (first["id"], first["parent"], first["max_model_len"]) == ("a", "base", None)
    assert isinstance(first["created"], int)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({}, "Bad Request", "body.lora_name"),
        ({"lora_path": "/x"}, "Bad Request", "body.lora_name"),
        ({"lora_name": 5, "lora_path": "/x"}, "Bad Request", "body.lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, "InvalidUserInput", None),
    ],
)
def test_a_name_is_needed(
    web: Web, path: str, body: dict[str, Any], kind: str, param: str | None
) -> None:
    error = web.refusal(path, **body)
    assert (error["type"], error["param"]) == (kind, param)
    words = {
        LOAD: "Both 'lora_name' and 'lora_path' must be provided.",
        UNLOAD: "'lora_name' needs to be provided to unload a LoRA adapter.",
    }
    starts = "1 validation error:\n  " if param else words[path]
    assert error["message"].startswith(starts)


def test_a_path_is_needed_and_a_name_that_is_not_the_base_models(web: Web, spoken: Spoken) -> None:
    assert web.refusal(LOAD, lora_name="x", lora_path="")["type"] == "InvalidUserInput"
    assert web.refusal(LOAD, lora_name="x")["param"] == "body.lora_path"
    error = refused(load(web, "base", spoken.adapters["a"]), 400)
    assert error["message"] == "The lora adapter 'base' conflicts with a served base model."
    assert error["type"] == "InvalidUserInput"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "x\\y",
            "x,y",
            "a\x00b",
            "..",
            "a/../b",
            "a\nb",
            "\x7f",
            "a\u202eb",
            "é" * 129,
            "x" * 257,
        ),
        *("x@2", "x@-0.5"),  # the strength of an adapter
    ],
)
def test_a_name_that_cannot_be_one_is_refused(web: Web, spoken: Spoken, name: str) -> None:
    error = refused(load(web, name, spoken.adapters["a"]), 400)
    assert error["param"] == "lora_name"
    assert names(web) == ["base", "a", "b"]


@pytest.mark.parametrize("name", ["org/name", "é" * 128, "a.b-c_d", "x y", "a:b", "base:b", "@"])
def test_other_names_are_taken(web: Web, spoken: Spoken, name: str) -> None:
    assert load(web, name, spoken.adapters["a"]).status_code == 200
    assert said(web, name) == said(web, "a")
    assert web.client.get(f"{KNOWN}/{name}").json()["name"] == name
    assert web.client.delete(f"/adapters/{name}").status_code == 200
    assert names(web) == ["base", "a", "b"]


def test_what_lies_elsewhere_is_as_what_is_not_there(
    web: Web, spoken: Spoken, place: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "x"
    shutil.copytree(spoken.adapters["a"], outside)
    (place / "link").mkdir()
    (place / "link" / "x").symlink_to(outside)
    (place / "loop").mkdir()
    (place / "loop" / "x").symlink_to("x")
    (place / "empty" / "x").mkdir(parents=True)
    paths: list[Path | str] = [
        place / "x",  # nothing
        outside,
        place / "link" / "x",
        place / "loop" / "x",
        place / "empty" / "x",
        f"{place}/../../../../{tmp_path}/x",
        os.path.relpath(outside),
        "x",
        "org/x",
        f"{place}/\0/x",
        f"{place}/{'y' * 5000}/x",
        f"{spoken.root}_/x",
        "~/x",
    ]
    answers = {(r.status_code, r.content) for r in (load(web, "x", path) for path in paths)}
    assert len(answers) == 1
    error = refused(load(web, "x", outside), 404)
    assert error["type"] == "NotFoundError"
    assert error["message"] == "Loading lora x failed: No adapter found for x"
    assert names(web) == ["base", "a", "b"]
    (place / "inside").symlink_to(spoken.adapters["a"])  # a link that stays below the root
    assert load(web, "x", place / "inside").status_code == 200
    assert unload(web, "x").status_code == 200


def test_files_of_an_adapter_lie_below_the_root_too(
    web: Web, spoken: Spoken, place: Path, tmp_path: Path
) -> None:
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        folder = place / file
        shutil.copytree(spoken.adapters["a"], folder)
        (folder / file).rename(tmp_path / file)
        (folder / file).symlink_to(tmp_path / file)
        response = load(web, "x", folder)
        assert response.status_code in (404, 500)
        assert str(tmp_path) not in response.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 32}, "LoRA rank 32 is greater than max_lora_rank 16"),
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "Unsupported modules_to_save"),
    ],
)
def test_a_bad_adapter_is_refused_in_vllms_words_and_ours(
    web: Web, manifest: Manifest, place: Path, fields: dict[str, Any], words: str
) -> None:
    error = refused(load(web, "bad", write_adapter(place / "bad", manifest, **fields)), 500)
    assert error["type"] == "InternalServerError"
    theirs, _, ours = error["message"].partition("; ")
    assert words in theirs
    assert ours
    assert str(place) not in error["message"]
    assert names(web) == ["base", "a", "b"]
    write_adapter(place / "bad", manifest)  # the name is still free
    assert load(web, "bad", place / "bad").status_code == 200
    assert unload(web, "bad").status_code == 200


def test_damaged_files_are_the_adapters_fault_and_told_without_a_path(
    web: Web, spoken: Spoken, place: Path
) -> None:
    for file, content in (
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[" * 100_000),
        ("adapter_model.safetensors", b"no tensors"),
        ("adapter_model.safetensors", b""),
    ):
        shutil.copytree(spoken.adapters["a"], place / "x", dirs_exist_ok=True)
        (place / "x" / file).write_bytes(content)
        error = refused(load(web, "x", place / "x"), 500)
        assert str(spoken.root) not in error["message"]
        assert len(error["message"]) < 1000
    assert names(web) == ["base", "a", "b"]


def test_json_tells_what_was_loaded(web: Web, spoken: Spoken) -> None:
    known = loaded(web, "x", spoken.adapters["b"])
    assert known["milliseconds"] > 0
    assert known.pop("message") == "Success: LoRA adapter 'x' added successfully."
    assert known["warnings"] == []
    assert known.keys() >= {"name", "version", "sha256", "rank", "bytes", "level", "slot"}
    assert (known["name"], known["rank"], known["level"]) == ("x", 8, "memory")
    assert (known["leases"], known["pinned"]) == (0, False)
    files = {**known, "path": str(spoken.adapters["b"]), "running": 0, "waiting": 0}
    assert web.client.get(f"{KNOWN}/x").json() == files
    assert files in web.client.get(KNOWN).json()["data"]
    b = web.client.get(f"{KNOWN}/b").json()
    assert (b["sha256"], b["bytes"]) == (known["sha256"], known["bytes"])
    body = {"lora_name": "x", "wait": True}
    response = web.client.post(UNLOAD, json=body, headers={"accept": "application/json"})
    assert response.json()["bytes_freed"] == known["bytes"]
    assert refused(web.client.get(f"{KNOWN}/x"), 404)["type"] == "NotFoundError"


def test_an_adapter_is_replaced_in_place_and_answers_at_once(
    web: Web, manifest: Manifest, place: Path
) -> None:
    first = loaded(web, "x", write_adapter(place / "x", manifest, seed=1))
    before = said(web, "x")
    write_adapter(place / "x", manifest, seed=2)
    second = loaded(web, "x", place / "x", load_inplace=True)
    assert second["version"] > first["version"]
    assert second["sha256"] != first["sha256"]
    after = said(web, "x")
    assert after != before
    loaded(web, "y", place / "x")
    assert said(web, "y") == after
    assert loaded(web, "z", place / "x", load_inplace=True)["name"] == "z"  # nothing to replace
    write_adapter(place / "x", manifest, rank=17)
    refused(load(web, "x", place / "x", load_inplace=True), 500)
    assert said(web, "x") == after  # the old one is kept
    for name in "xyz":
        assert unload(web, name).status_code == 200


@pytest.mark.parametrize("field", ["expected_version", "expected_generation"])
def test_a_version_that_is_not_the_expected_one_is_a_conflict(
    web: Web, spoken: Spoken, field: str
) -> None:
    path = spoken.adapters["a"]
    assert refused(load(web, "x", path, **{field: 7}), 409)["type"] == "ConflictError"
    assert names(web) == ["base", "a", "b"]
    version = loaded(web, "x", path, **{field: 0})["version"]
    for wrong in (0, version + 1, -1):
        for inplace in (True, False):
            error = refused(load(web, "x", path, load_inplace=inplace, **{field: wrong}), 409)
            assert f"version {version}" in error["message"]
    assert loaded(web, "x", path, **{field: version})["version"] > version
    assert unload(web, "x").status_code == 200


def test_one_of_several_who_load_a_name_at_a_time_has_it(web: Web, spoken: Spoken) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = [spoken.adapters["a"]] * 8
        found = [r.status_code for r in pool.map(lambda path: load(web, "x", path), paths)]
    assert sorted(found) == [200, *[400] * 7]
    with ThreadPoolExecutor(8) as pool:
        found = [r.status_code for r in pool.map(lambda _: unload(web, "x"), range(8))]
    assert sorted(found) == [200, *[404] * 7]


def test_a_pinned_adapter_has_a_slot_until_it_is_unpinned(web: Web, spoken: Spoken) -> None:
    loaded(web, "x", spoken.adapters["a"])
    known = web.client.post(f"{KNOWN}/x/pin").json()
    assert (known["pinned"], known["level"], known["slot"] in (0, 1)) == (True, "slot", True)
    for name in "abab":  # they take turns in the other slot
        said(web, name)
    assert web.client.get(f"{KNOWN}/x").json() == known
    error = refused(web.client.post(f"{KNOWN}/a/pin"), 409)  # of the last slot
    assert error["type"] == "ConflictError"
    assert error["message"].endswith("pinned are ['x']; unpin one first")
    assert web.client.post(f"{KNOWN}/x/unpin").json()["pinned"] is False
    for name in "abab":
        said(web, name)
    assert web.client.get(f"{KNOWN}/x").json()["slot"] is None


def test_what_was_not_loaded_is_not_found(web: Web) -> None:
    web.answer(COMPLETIONS, prompt=PROMPT, lora=[{"name": "a"}, {"name": "b", "scale": 2}])
    for name in ("nobody", "a@0.5", "(a@1.0,b@2.0)"):
        for what in ("pin", "unpin"):
            refused(web.client.post(f"{KNOWN}/{name}/{what}"), 404)
        refused(web.client.get(f"{KNOWN}/{name}"), 404)
        refused(unload(web, name), 404)
    refused(web.client.post(f"{KNOWN}/a/turn"), 404)


# --------------------------------------------------------------------------- which routes there are


def test_the_routes_that_change_adapters_are_not_there_unless_enabled(spoken: Spoken) -> None:
    modules = [("a", str(spoken.adapters["a"]))]
    with web_server(spoken.config(lora_modules=modules), allows_updates=False) as web:
        for method, path in (
            *(("POST", path) for path in (LOAD, UNLOAD, "/adapters")),
            ("DELETE", "/adapters/a"),
        ):
            body = {"lora_name": "a", "lora_path": "/x", "name": "a", "src": "/x"}
            response = web.client.request(method, path, json=body)
            refused(response, 404)
        for what in ("pin", "unpin", "turn"):
            assert refused(web.client.post(f"{KNOWN}/a/{what}"), 404)["message"] == "Not Found"
        assert names(web) == ["base", "a"]
        assert "/v1/load_lora_adapter" not in web.client.get("/openapi.json").text
        assert web.client.get(f"{KNOWN}/a").json()["name"] == "a"


def test_other_methods_and_paths_are_told_in_the_same_shape(web: Web) -> None:
    refused(web.client.get(LOAD), 405)
    refused(web.client.put(COMPLETIONS, json={}), 405)
    refused(web.client.get("/v1/nothing"), 404)
    refused(web.client.get(f"{KNOWN}/a/b/c"), 404)


def test_sagemakers_routes_do_the_same(web: Web, spoken: Spoken) -> None:
    path = str(spoken.adapters["b"])
    assert web.post("/adapters", name="org/x", src=path).text == (
        "Success: LoRA adapter 'org/x' added successfully."
    )
    refused(web.post("/adapters", name="org/x", src=path), 400)
    assert web.refusal("/adapters", src=path)["param"] == "body.name"
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "org/x"}
    for body in (
        {"prompt": PROMPT, **GREEDY},
        {"messages": [{"role": "user", "content": "w5 w6 w7 w8"}], "model": "a", **GREEDY},
    ):
        response = web.client.post("/invocations", json=body, headers=header)
        kind = CHATS if "messages" in body else COMPLETIONS
        answer = web.answer(kind, **{**body, "model": "b"})
        assert response.json()["choices"] == answer["choices"]
        assert response.json()["model"] == "org/x"
    assert web.answer("/invocations", prompt=PROMPT)["model"] == "base"
    unknown = {"X-Amzn-SageMaker-Adapter-Identifier": "y"}
    refused(web.client.post("/invocations", json={"prompt": PROMPT}, headers=unknown), 404)
    response = web.client.delete("/adapters/org/x")
    assert response.text == "Success: LoRA adapter 'org/x' removed successfully."
    refused(web.client.delete("/adapters/org/x"), 404)
