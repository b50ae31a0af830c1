"""Names on the Hugging Face hub, from a cache laid out as the hub's own."""

import shutil
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
from conftest import TinyEngine
from support.commands import trt_lora

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.terminal.adapters import hub_path, name_and_path

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(autouse=True)
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A cache with two revisions of org/name, and no way to the hub."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "cache" / "models--org--name"
    for revision, commit in COMMITS.items():
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "adapter_config.json").write_text("{}")
    return {revision: repo / "snapshots" / commit for revision, commit in COMMITS.items()}


def test_a_name_is_where_the_cache_has_it(snapshots: dict[str, Path]) -> None:
    assert hub_path(Path("org/name")) == snapshots["main"]
    assert hub_path(Path("org/name@v1")) == snapshots["v1"]
    assert hub_path(Path("org/name"), "v1") == snapshots["v1"]
    assert name_and_path("a=org/name@v1") == ("a", snapshots["v1"])


def test_an_adapter_on_the_hub_is_converted(
    tiny_engine: TinyEngine,
    snapshots: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(tiny_engine.adapter, snapshots["main"], dirs_exist_ok=True)
    out = tmp_path / "out"
    printed = trt_lora(capsys, "convert-adapter", "org/name", out, "--format", "peft")
    assert printed == f"{out}: 8 tensors from org/name\n"


def test_a_path_that_is_there_or_could_be_is_itself(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    long = f"{'x' * 300}/name"
    for path in (
        "org/name",
        "org/typo",
        "name",
        "a/b/c",
        "../org/name",
        "/org/name",
        "x.json",
        long,
    ):
        assert hub_path(Path(path)) == Path(path)


@pytest.mark.parametrize("name", ["org/other", "org/name@v2"])
def test_what_is_nowhere_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^org/\w+ is no directory here, and cannot be") as error:
        hub_path(Path(name))
    assert "\n" not in str(error.value)
