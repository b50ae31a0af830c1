"""Adapters by name from repositories of a hub: allowed ones alone, and what is asked for alone."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants as constants
import pytest
from support.adapter_routes import KNOWN, PROMPT, names, said
from support.fakes.fake_hub import FakeHub, fake_hub
from support.served_engines import Spoken, write_adapter
from support.web_server import COMPLETIONS, web_server

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters import hub_repos
from trt_lora.runtime.server.adapters.hub_repos import HubRepos

REPO = "org/adapters"


@pytest.fixture
def hub(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with an adapter at the top of a repository, two in folders, and one of another."""
    home = tmp_path / "hub" / REPO
    for seed, place in enumerate((home, home / "sql", home / "deep" / "a [b]", home / "bad")):
        write_adapter(place, manifest, seed=seed, rank=32 if place.name == "bad" else 4)
    (home / "sql" / "adapter_model.bin").write_bytes(b"a pickle")
    (home / "sql" / "optimizer.safetensors").write_bytes(b"large")
    write_adapter(tmp_path / "hub" / "org" / "other", manifest)
    with fake_hub(tmp_path / "hub") as running:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            constants.ENDPOINT, running.address
        )
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield running


def found(repos: HubRepos, name: str) -> Path | None:
    return asyncio.run(repos.resolve("base", name))


def later(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so many seconds pass."""
    now = time.monotonic() + seconds
    patch.setattr(hub_repos, "time", SimpleNamespace(monotonic=lambda: now))


@pytest.fixture
def repos() -> Iterator[HubRepos]:
    made = HubRepos([REPO])
    yield made
    asyncio.run(made.close())


def test_adapters_of_a_hub_are_loaded_when_a_request_names_them(
    hub: FakeHub, spoken: Spoken, manifest: Manifest
) -> None:
    with web_server(spoken.config(hub_repos=[REPO])) as web:
        assert (names(web), hub.asked) == (["base"], [])
        answers = {str(said(web, f"{REPO}{sub}")) for sub in ("", "/sql", "/deep/a [b]")}
        assert len(answers) == 3
        assert names(web) == ["base", REPO, f"{REPO}/sql", f"{REPO}/deep/a [b]"]
        error = web.refusal(COMPLETIONS, 400, prompt=PROMPT, model=f"{REPO}/bad")
        assert error["message"] == (f"LoRA adapter '{REPO}/bad' was found but could not be loaded.")
        (refused,) = web.client.get(KNOWN).json()["refused"]
        assert refused["name"] == f"{REPO}/bad"
        for other in ("org/other", "org/nothing", f"{REPO}x", f"{REPO}/no", "org", f"{REPO}/sql/x"):
            web.refusal(COMPLETIONS, 404, prompt=PROMPT, model=other)
        assert not any("other" in path for path in hub.asked)


def test_no_more_is_fetched_than_is_asked_for(hub: FakeHub, repos: HubRepos) -> None:
    path = found(repos, f"{REPO}/sql")
    assert path is not None
    assert sorted(file.name for file in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not (path.parent / "adapter_model.safetensors").exists()
    assert any(file.endswith("sql/adapter_model.safetensors") for file in hub.asked)


def test_unknown_names_cost_the_hub_nothing(hub: FakeHub, repos: HubRepos) -> None:
    assert found(repos, f"{REPO}/sql") is not None
    before = len(hub.asked)
    for sub in ("no", "../sql", "..", "../../org/other", "sql/..", "sql/../sql", "*", "deep"):
        assert found(repos, f"{REPO}/{sub}") is None
    for other in ("/", "/sql/", "/sql//", "/sql/.", "/./sql", "//sql", "/.", "//", "/deep//a [b]"):
        assert found(repos, f"{REPO}{other}") is None, other
    assert len(hub.asked) == before


def test_a_new_commit_is_seen_after_a_while(
    hub: FakeHub, repos: HubRepos, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = found(repos, f"{REPO}/sql")
    write_adapter(hub.folder / REPO / "sql", manifest, seed=9)
    write_adapter(hub.folder / REPO / "new", manifest)
    assert (found(repos, f"{REPO}/new"), found(repos, f"{REPO}/sql")) == (None, old)
    later(monkeypatch, 61)
    assert found(repos, f"{REPO}/new") is not None
    assert found(repos, f"{REPO}/sql") not in (None, old)


def test_a_hub_that_fails_is_503_and_asked_again_after_a_while(
    hub: FakeHub, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_up = False
    with web_server(spoken.config(hub_repos=[REPO])) as web:
        error = web.refusal(COMPLETIONS, 503, prompt=PROMPT, model=f"{REPO}/sql")
        assert REPO in error["message"]
        asked = len(hub.asked)
        for _ in range(3):
            web.refusal(COMPLETIONS, 503, prompt=PROMPT, model=f"{REPO}/sql")
        assert len(hub.asked) == asked
        said(web, "base")
        hub.is_up = True
        later(monkeypatch, 6)
        said(web, f"{REPO}/sql")


def test_what_the_cache_has_is_served_without_the_hub(hub: FakeHub, spoken: Spoken) -> None:
    with web_server(spoken.config(hub_repos=[REPO])) as web:
        first = said(web, f"{REPO}/sql")
    hub.is_up = False
    with web_server(spoken.config(hub_repos=[REPO])) as web:
        assert said(web, f"{REPO}/sql") == first


@pytest.mark.parametrize("repo", ["org", "/x", "org/", "org/a/b", ""])
def test_what_names_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(ConfigError, match="expected ORG/REPO"):
        HubRepos([repo])


def test_it_is_imported_where_it_is_asked_for_alone() -> None:
    code = (
        "import sys; import trt_lora.runtime.server.app; "
        "assert 'huggingface_hub' not in sys.modules; sys.modules['huggingface_hub'] = None; "
        "import trt_lora.runtime.server.adapters.hub_repos"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "pip install 'trt-lora[hub]'" in ended.stderr.splitlines()[-1]
    assert BackendError.__name__ in ended.stderr.splitlines()[-1]
