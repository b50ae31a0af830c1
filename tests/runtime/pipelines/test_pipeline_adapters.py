"""Adapters of several engines under one name: on all of them or on none, whatever fails."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from support.adapters.diffusion.models import Deltas, assert_same
from support.adapters.diffusion.pipelines import MODELS, UNET, PipelineWriting, deltas_of
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.store.store import AdapterStore

Held = dict[str, AdapterStore]


@pytest.fixture
def style(tmp_path: Path) -> tuple[Path, Deltas]:
    writing = PipelineWriting().kohya()
    return writing.save(tmp_path / "style.safetensors"), writing.expected


@pytest.fixture
def face(tmp_path: Path) -> tuple[Path, Deltas]:
    writing = PipelineWriting(1).diffusers(["unet", "text_encoder_2"])
    return writing.save(tmp_path / "face.safetensors"), writing.expected


Files = tuple[Path, Deltas]


def test_a_name_means_the_adapter_on_every_component_that_it_changes(
    held: Held, adapters: PipelineAdapters, style: Files, face: Files
) -> None:
    assert adapters.load("style", style[0]).keys() == {*MODELS}
    coverage = adapters.load("face", face[0])
    assert coverage.keys() == adapters.coverage("face").keys() == {"unet", "text_encoder_2"}
    assert adapters.names == ("style", "face")
    assert_same(deltas_of(adapters, held, "style"), style[1])
    assert_same(deltas_of(adapters, held, "face"), face[1])
    assert adapters.on("text_encoder", "face") is None  # the base model
    assert adapters.on("unet", None) is None


def test_weights_of_a_blend_are_by_component_and_by_prefix(
    held: Held, adapters: PipelineAdapters, style: Files, face: Files
) -> None:
    adapters.load("style", style[0])
    adapters.load("face", face[0])
    by_component: dict[str, Strength] = {
        "unet": {"down_blocks.1": 0.25, "": 2.0},
        "text_encoder": 0.5,
    }
    adapters.blend("both", {"style": by_component, "face": -1})
    expected = {}
    for path, delta in style[1].items():
        weight = {"unet": 0.25, "text_encoder": 0.5}.get(path.partition(".")[0], 1.0)
        expected[path] = weight * delta - face[1].get(path, np.zeros_like(delta))
    assert_same(deltas_of(adapters, held, "both"), expected)


def test_blends_that_are_replaced_take_turns_at_two_names_of_the_stores(
    held: Held, adapters: PipelineAdapters, style: Files
) -> None:
    adapters.load("style", style[0])
    names = set()
    for weight in (0.1, 0.2, 0.3, 0.4):
        adapters.blend("b", {"style": weight}, replace=True)
        found = deltas_of(adapters, held, "b")
        assert_same(found, {path: weight * delta for path, delta in style[1].items()})
        names.add(adapters.on("unet", "b"))
    assert len(names) == 2
    assert adapters.names == ("style", "b")
    with adapters.using("b"):  # what a run holds is there for the blend after it
        adapters.blend("b", {"style": 0.5}, replace=True)
    assert [len(store.names) for store in held.values()] == [3] * 3
    adapters.unload("style")
    assert [store.names for store in held.values()] == [()] * 3
    with refused(UnknownAdapterError, "'b' was made of 'style'", "blend it again"):
        adapters.on("unet", "b")


def test_a_blend_of_a_blend_is_gone_when_that_is_replaced(
    held: Held, adapters: PipelineAdapters, style: Files
) -> None:
    """By one of the same adapters too, whose memory stays."""
    adapters.load("style", style[0])
    adapters.blend("mix", {"style": 0.5})
    adapters.blend("top", {"mix": 0.5})
    adapters.blend("mix", {"style": 2.0}, replace=True)
    with refused(UnknownAdapterError, "'top' was made of 'mix'"):
        adapters.on("unet", "top")
    adapters.blend("top", {"mix": 0.5})
    assert_same(deltas_of(adapters, held, "top"), style[1])
    assert [len(store.names) for store in held.values()] == [4] * 3


def test_runs_may_have_an_adapter_a_row(
    adapters: PipelineAdapters, style: Files, face: Files
) -> None:
    adapters.load("style", style[0])
    adapters.load("face", face[0])
    names = {name: {c: adapters.on(c, name) for c in MODELS} for name in ("style", "face")}
    with adapters.using(["style", None, "face", "style"]) as rows:
        for component in MODELS:
            own, other = names["style"][component], names["face"][component]
            assert rows[component] == [own, None, other, own]
    with adapters.using(["face", None]) as rows:
        assert rows["text_encoder"] is None  # of which "face" changes nothing


def test_adapters_in_memory_are_kept_by_component(
    held: Held, adapters: PipelineAdapters, style: Files
) -> None:
    adapters.add("m", {"unet": load_adapter(style[0], held["unet"].manifest)})
    own = {path: delta for path, delta in style[1].items() if path.startswith("unet.")}
    assert_same(deltas_of(adapters, held, "m"), own)
    with refused(ConfigError, "'vae'", "unet"):
        adapters.add("n", {"vae": load_adapter(style[0], held["unet"].manifest)})


CALLS: dict[str, Callable[[PipelineAdapters, Path], object]] = {
    "load": lambda adapters, file: adapters.load("new", file),
    "replace": lambda adapters, file: adapters.load("style", file, replace=True),
    "first blend": lambda adapters, file: adapters.blend("new", {"style": 0.5}),
    "next blend": lambda adapters, file: adapters.blend("b", {"style": 0.5}, replace=True),
    "add": lambda adapters, file: adapters.add(
        "new",
        {c: load_adapter(file, store.manifest) for c, store in adapters._stores.items()},
    ),
}


@pytest.mark.parametrize("component", [*MODELS][1:])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [StateError("planted"), KeyboardInterrupt("planted")], ids=repr)
def test_a_component_that_fails_leaves_all_of_them_as_they_were(
    call: str,
    component: str,
    error: BaseException,
    held: Held,
    adapters: PipelineAdapters,
    style: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters.load("style", style[0])
    for weight in (0.25, 0.75):
        adapters.blend("b", {"style": weight}, replace=True)
    before = _state(adapters, held)

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    for method in ("load", "add", "blend"):
        monkeypatch.setattr(held[component], method, fail)
    with pytest.raises(type(error), match="planted"):
        CALLS[call](adapters, style[0])
    after = _state(adapters, held)
    assert after == before
    for store in held.values():
        store.check_integrity()
    monkeypatch.undo()
    CALLS[call](adapters, style[0])  # and it can be done again


def _state(adapters: PipelineAdapters, held: Held) -> tuple[object, ...]:
    """Names, versions, bytes and values; without the memory that a blend keeps for the next one."""
    meant = {(c, n): adapters.on(c, n) for c in held for n in adapters.names}
    infos = [held[c].info(own) for (c, _), own in meant.items() if own is not None]
    values = [
        (name, path, delta.tobytes())
        for name in adapters.names
        for path, delta in deltas_of(adapters, held, name).items()
    ]
    spares = {c: {*store.names} - {*meant.values()} for c, store in held.items()}
    assert all(len(names) <= 1 for names in spares.values())
    return adapters.names, meant, infos, values


def test_an_unload_that_a_store_refuses_is_of_all_components_and_is_asked_for_again(
    held: Held, adapters: PipelineAdapters, style: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.load("style", style[0])
    adapters.load("other", style[0])

    def fail(name: str) -> None:
        raise StateError("planted")

    monkeypatch.setattr(held["text_encoder_2"], "unload", fail)
    adapters.unload("style")
    assert adapters.names == ("other",)
    assert [len(store.names) for store in held.values()] == [1, 1, 2]
    monkeypatch.undo()
    adapters.unload("other")
    assert [store.names for store in held.values()] == [()] * 3


def test_a_name_that_is_resolved_once_is_of_one_version_whatever_other_threads_do(
    held: Held, adapters: PipelineAdapters, tmp_path: Path
) -> None:
    files = [
        PipelineWriting(seed).kohya().save(tmp_path / f"{seed}.safetensors") for seed in (0, 1)
    ]
    adapters.load("style", files[0])
    adapters.blend("b", {"style": 0.5})
    stop, failures = Event(), list[BaseException]()

    def replace() -> None:
        try:
            for turn in range(12):
                adapters.load("style", files[turn % 2], replace=True)
                for weight in (0.5, 0.25, 0.75):
                    adapters.blend("b", {"style": weight}, replace=True)
        except BaseException as error:
            failures.append(error)
        stop.set()

    thread, seen = Thread(target=replace), set[str]()
    thread.start()
    while not stop.is_set():
        for name in ("style", "b"):
            with suppress(UnknownAdapterError), adapters.using(name) as own:
                values = {c: _first(held[c], str(own[c])) for c in held}
                assert len(set(own.values())) == 1  # of one generation
                assert values == {c: _first(held[c], str(own[c])) for c in held}  # which stays
                seen.add(str(own["unet"]))
    thread.join()
    assert not failures
    assert len(seen) > 3  # a blend is unknown only between a new part and the next blend
    assert [len(store.names) <= 3 for store in held.values()] == [True] * 3
    for store in held.values():
        store.check_integrity()


def _first(store: AdapterStore, name: str) -> bytes:
    tensors, names = store.bindings.rows([name]), store.manifest.binding_names
    path = store.get_coverage(name).adapted[0].path
    return bytes(tensors[names.binding("B", path)].numpy().tobytes())


def test_what_is_in_use_stays_until_it_is_let_go_of(
    held: Held, adapters: PipelineAdapters, style: Files, face: Files
) -> None:
    adapters.load("style", style[0])
    adapters.blend("b", {"style": 0.5})
    with adapters.using("b") as own:
        adapters.load("style", face[0], replace=True)
        adapters.unload("style")
        assert adapters.names == ()
        values = _first(held["text_encoder"], str(own["text_encoder"]))
        assert values
    assert [store.names for store in held.values()] == [()] * 3


@pytest.fixture
def refusals(adapters: PipelineAdapters, style: Files) -> Iterator[PipelineAdapters]:
    adapters.load("style", style[0])
    adapters.blend("b", {"style": 1})
    yield adapters
    assert adapters.names == ("style", "b")


def test_what_cannot_be_is_refused_by_name(refusals: PipelineAdapters, style: Files) -> None:
    adapters = refusals
    with refused(AdapterError, "named 'style' is loaded already", "replace=True"):
        adapters.load("style", style[0])
    with refused(AdapterError, "'text_encodr' is no component", "did you mean 'text_encoder'?"):
        adapters.blend("c", {"style": {"text_encodr": 1.0}})
    with refused(AdapterError, "'down_blocks.9'"):
        adapters.blend("c", {"style": {"unet": {"down_blocks.9": 1.0}}})
    with refused(AdapterError, "finite"):
        adapters.blend("c", {"style": {"text_encoder_2": float("nan")}})
    with refused(UnknownAdapterError, "'styl'", "did you mean 'style'?"):
        adapters.blend("c", {"styl": 1.0})
    with refused(AdapterError, "would replace what 'b' is made of"):
        adapters.blend("style", {"b": 0.5}, replace=True)
    with refused(AdapterError, "means the adapter 'a' at strength 0.5"):
        adapters.load("a@0.5", style[0])
    with refused(ConfigError, "'vae'"):
        adapters.on("vae", "style")
    with refused(UnknownAdapterError, "'x'"):
        adapters.unload("x")
    assert UNET in {site.path for site in adapters.coverage("style")["unet"].adapted}
