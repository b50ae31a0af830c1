"""Dockerfile and compose file name what exists: folders, extras, stages, releases.

hadolint reads the Dockerfile in `make lint`; `make docker` builds it, where there is docker.
"""

import re
import tomllib

from architecture.sources import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
STAGE = re.compile(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", re.MULTILINE | re.DOTALL)
STAGES: dict[str, str] = dict(STAGE.findall(DOCKERFILE))


def test_every_base_image_is_pinned_to_a_release_of_a_python_that_we_declare() -> None:
    pinned = re.findall(r"^FROM python:(3\.\d+)\.\d+-slim-bookworm AS ", DOCKERFILE, re.MULTILINE)
    assert len(pinned) == DOCKERFILE.count("\nFROM ") == len(STAGES) == 3
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.rpartition(" ")[2] for line in project["classifiers"]}
    assert set(pinned) <= declared


def test_what_is_installed_is_declared_and_torch_is_that_of_make() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name for group in re.findall(r"\[([a-z,]+)\]", DOCKERFILE) for name in group.split(",")
    }
    assert named == {"cpu", "text", "export", "serve"} <= {*project["optional-dependencies"]}
    (torch,) = re.findall(r"torch==([\d.]+)", DOCKERFILE)
    assert f"torch=={torch}" in (ROOT / "Makefile").read_text()
    (smallest,) = re.findall(r'"gguf>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (gguf,) = re.findall(r"gguf==([\d.]+)", DOCKERFILE)
    assert [*map(int, gguf.split("."))] >= [*map(int, smallest.split("."))]


def test_nothing_runs_as_root() -> None:
    for name in ("runtime", "demo"):
        assert re.findall(r"^USER (\S+)", STAGES[name], re.MULTILINE) == ["1000"]


def test_the_demo_of_the_image_is_that_of_make() -> None:
    command = re.findall(r'^CMD \["python", "-m", "([\w.]+)"\]', STAGES["demo"], re.MULTILINE)
    assert len(command) == 1
    assert f"$(BIN)/python -m {command[0]} $(DEMO)\n" in (ROOT / "Makefile").read_text()


def test_compose_builds_stages_that_exist_and_mounts_volumes_that_are_declared() -> None:
    targets = re.findall(r"target: (\w+)", COMPOSE)
    assert set(targets) == {"demo", "runtime"} <= set(STAGES)
    mounted = set(re.findall(r"- (\w+):/", COMPOSE))
    declared = COMPOSE.partition("\nvolumes:\n")[2]
    assert mounted == set(re.findall(r"(\w+):", declared))
    assert "- model:/demo/build\n" in COMPOSE
    assert "/demo/build /demo/engines" in STAGES["demo"]
