"""Adapters loaded, unloaded, listed and asked over HTTP."""

from pathlib import Path
from typing import Any

import httpx
from support.eventually import eventually
from support.web_server import COMPLETIONS, Web

from trt_lora.runtime import SamplingParams

LOAD, UNLOAD, KNOWN = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"
PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
SAMPLING = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)


def load(web: Web, name: str, path: Path | str, **more: Any) -> httpx.Response:
    """Ask for an adapter to be loaded."""
    return web.post(LOAD, lora_name=name, lora_path=str(path), **more)


def unload(web: Web, name: str, **more: Any) -> httpx.Response:
    """Ask for an adapter to be unloaded."""
    return web.post(UNLOAD, lora_name=name, **more)


def loaded(web: Web, name: str, path: Path | str, **more: Any) -> Any:
    """What JSON tells of an adapter that was loaded."""
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = web.client.post(LOAD, json=body, headers={"accept": "application/json"})
    assert response.status_code == 200, response.text
    return response.json()


def names(web: Web) -> list[str]:
    """The models that are served."""
    return [card["id"] for card in web.client.get("/v1/models").json()["data"]]


def said(web: Web, model: str) -> Any:
    """The tokens that a model answers."""
    body = {"prompt": PROMPT, "model": model, "return_token_ids": True, **GREEDY}
    return web.answer(COMPLETIONS, **body)["choices"][0]["token_ids"]


def version(web: Web, name: str) -> int:
    """The version that a name means; 0 where it was not read yet, or is none."""
    return int(web.client.get(f"{KNOWN}/{name}").json().get("version", 0))


def is_newer(web: Web, name: str, than: int) -> bool:
    """Whether a name means a later version, after a while."""
    return eventually(lambda: version(web, name) > than)


def refused_of_folder(web: Web) -> dict[str, str]:
    """What is offered and not taken, and why."""
    return {each["name"]: each["error"] for each in web.client.get(KNOWN).json()["refused"]}
