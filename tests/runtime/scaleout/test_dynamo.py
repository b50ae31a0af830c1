"""A worker of Dynamo: its answers, and the adapters that it publishes."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.asked_worker import BASE, PROMPT, AskedWorker
from support.eventually import SECONDS
from support.fakes.fake_dynamo import EngineShutdown, FakeContext, InvalidArgument, Unknown
from support.fakes.slot_engine import POISON, expected_answer, number_file

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime import SamplingParams

A1, A2 = "a1.safetensors", "a2.safetensors"


def expected(number: int, most: int = 4) -> list[int | None]:
    """What the engine answers greedily with an adapter; 0 is the base model."""
    return expected_answer(PROMPT, number, SamplingParams(temperature=0, max_tokens=most))


def ids(chunks: list[dict[str, Any]]) -> list[int]:
    """The tokens of chunks."""
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def comes(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until something is true."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)


def test_answers_are_the_engines_with_each_adapter(worker: AskedWorker) -> None:
    async def asks() -> None:
        for number, name in ((0, BASE), (1, A1), (2, A2), (0, "")):
            *_, last = chunks = await worker.answer(name)
            assert ids(chunks) == expected(number)
            assert last["finish_reason"] == "length"
            usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            assert last["completion_usage"] == usage
            assert all("finish_reason" not in chunk for chunk in chunks[:-1])
        routed = await worker.answer(BASE, routing={"lora_name": A1})
        assert ids(routed) == expected(1)
        probe = await worker.worker.health_check_payload()
        chunks = [c async for c in worker.worker.generate(probe, FakeContext())]
        assert len(chunks) == 1

    worker.run(asks)


def test_an_adapter_that_cannot_be_had_is_an_error_by_name_and_never_the_base(
    worker: AskedWorker,
) -> None:
    (worker.folder / "half").mkdir()
    (worker.folder / "bad.safetensors").write_bytes(b"bad")
    (worker.folder.parent / "out.safetensors").write_bytes(b"")
    (worker.folder / "link.safetensors").symlink_to(worker.folder.parent / "out.safetensors")

    async def asks() -> None:
        for name in ("nobody", "half", "bad.safetensors", "link.safetensors", "../out", "base "):
            with pytest.raises(InvalidArgument, match=f"adapter '{name}'") as error:
                await worker.answer(name)
            assert str(worker.folder) not in str(error.value)
        assert ids(await worker.answer(A1)) == expected(1)

    worker.run(asks)


def test_what_lies_in_the_folder_when_it_is_asked_is_what_answers(worker: AskedWorker) -> None:
    async def asks() -> None:
        assert ids(await worker.answer(A1)) == expected(1)
        shutil.copyfile(worker.folder / A2, worker.folder / "new")
        (worker.folder / "new").rename(worker.folder / A1)
        assert ids(await worker.answer(A1)) == expected(2)
        (worker.folder / A1).unlink()  # between the two renames of a replacement
        assert ids(await worker.answer(A1)) == expected(2)
        (worker.folder / A1).write_bytes(b"bad")
        with pytest.raises(InvalidArgument, match=A1):
            await worker.answer(A1)

    worker.run(asks)


def test_a_name_is_published_once_it_is_loaded_and_retracted_before_it_is_unloaded(
    worker: AskedWorker,
) -> None:
    async def changes() -> None:
        store = worker.worker._engine._engine.adapters
        events: list[tuple[str, str, bool]] = []

        def seen(what: str, real: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
            async def note(name: str) -> None:
                events.append((what, name, name in store.names))
                await real(name)

            return note

        updates = worker.worker._updates
        for what in ("publish", "retract"):
            setattr(updates, f"_{what}", seen(what, getattr(updates, f"_{what}")))
        for _ in range(2):  # once is enough
            done = await worker.told("load_lora", A1)
            assert (done["status"], done["lora_name"], done["lora_id"]) == ("success", A1, len(A1))
        assert await worker.told("list_loras", None) == {
            "status": "success",
            "loras": {A1: len(A1)},
            "count": 1,
        }
        assert (await worker.told("unload_lora", A1))["status"] == "success"
        assert A1 not in store.names
        assert events == [("publish", A1, True), ("retract", A1, True)]
        assert (await worker.told("list_loras", None))["count"] == 0

    worker.run(changes)
    assert worker.fake.told == [("published", A1), ("retracted", A1)]
    (found,) = worker.fake.registered
    assert found["base_model_path"] == found["path"] == str(worker.engine.directory)
    assert found["max_gpu_lora_count"] == 2


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("../out", None, "lora_name"),
        ("a,b", None, "lora_name"),
        (BASE, None, "base model"),
        (None, None, "lora_name is None"),
        ("nobody", None, "'nobody'"),
        (A1, {"uri": "file:///etc/passwd"}, "file:///etc/passwd"),
        (A1, {"uri": "s3://bucket/a1"}, "s3://bucket/a1"),
        ("other", {"uri": A1}, "'other'"),
    ],
)
def test_what_cannot_be_loaded_is_not_published(
    worker: AskedWorker, name: object, source: dict[str, str] | None, message: str
) -> None:
    async def loads() -> None:
        body = {"source": source} if source else {}
        answer = await worker.told("load_lora", name, **body)
        assert answer["status"] == "error"
        assert message in answer["message"]
        answer = await worker.told("unload_lora", name)
        assert answer["status"] == "error"

    worker.run(loads)
    assert worker.fake.told == []


def test_the_place_may_be_said_where_it_is_the_folders(worker: AskedWorker) -> None:
    async def loads() -> None:
        source = {"uri": f"file://{worker.folder / A1}"}
        assert (await worker.told("load_lora", A1, source=source))["status"] == "success"

    worker.run(loads)


def test_what_is_under_way_ends_before_its_adapter_is_unloaded(worker: AskedWorker) -> None:
    async def unloads() -> None:
        await worker.told("load_lora", A1)
        store = worker.worker._engine._engine.adapters
        worker.engine.shut()
        running = [asyncio.create_task(worker.answer(A1, context=FakeContext(n))) for n in "12345"]
        await comes(lambda: worker.engine.waits)
        assert (await worker.told("unload_lora", A1))["status"] == "success"
        assert worker.fake.told[-1] == ("retracted", A1)
        assert A1 in store.names
        late = asyncio.create_task(worker.answer(A1, context=FakeContext("late")))
        await asyncio.sleep(0.05)
        worker.engine.let()
        for answer in (*running, late):
            assert ids(await answer) == expected(1)
        assert A1 not in store.names

    worker.run(unloads)


def test_a_name_that_is_loaded_again_while_it_leaves_stays(worker: AskedWorker) -> None:
    async def changes() -> None:
        await worker.told("load_lora", A1)
        worker.engine.shut()
        running = asyncio.create_task(worker.answer(A1))
        await comes(lambda: worker.engine.waits)
        await worker.told("unload_lora", A1)
        await worker.told("load_lora", A1)
        worker.engine.let()
        assert ids(await running) == expected(1)
        assert A1 in worker.worker._engine._engine.adapters.names

    worker.run(changes)
    assert [what for what, _ in worker.fake.told] == ["published", "retracted", "published"]


def test_a_cancel_frees_the_row(worker: AskedWorker) -> None:
    async def cancels() -> None:
        scheduler = worker.worker._engine._scheduler
        context = FakeContext("gone")
        worker.engine.let(1)
        stream = worker.chunks(A1, 20, context=context)
        assert (await anext(stream))["token_ids"] == expected(1)[:1]
        await worker.worker.abort(context)
        worker.engine.let(2)  # steps, behind which the row is free, whoever asks for more
        await comes(lambda: not scheduler, 10)
        assert scheduler.running == 0
        *_, last = [chunk async for chunk in stream]
        assert last["finish_reason"] == "cancelled"
        await worker.worker.abort(context)  # it has ended already
        assert not worker.worker._streams

    worker.run(cancels)


def test_a_stream_that_is_closed_frees_the_row(worker: AskedWorker) -> None:
    async def leaves() -> None:
        worker.engine.let(1)
        stream: Any = worker.chunks(A1, 20)
        await anext(stream)
        await stream.aclose()
        worker.engine.let(2)
        await comes(lambda: not worker.worker._engine._scheduler, 10)

    worker.run(leaves)


def test_a_request_that_was_left_before_it_began_has_no_token(worker: AskedWorker) -> None:
    async def leaves() -> None:
        stopped = FakeContext(is_stopped=True)
        (chunk,) = await worker.answer(A1, 20, context=stopped)
        assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "cancelled")

    worker.run(leaves)


def test_several_answers_have_their_numbers(worker: AskedWorker) -> None:
    async def asks() -> None:
        sampling = {"temperature": 1.0, "n": 2, "seed": 5}
        chunks = await worker.answer(sampling_options=sampling)
        assert sorted(chunk["index"] for chunk in chunks) == [0] * 4 + [1] * 4
        assert sum("finish_reason" in chunk for chunk in chunks) == 2

    worker.run(asks)


def test_a_field_that_is_refused_is_the_requests_error(worker: AskedWorker) -> None:
    async def asks() -> None:
        with pytest.raises(InvalidArgument, match="use_beam_search is True"):
            await worker.answer(sampling_options={"use_beam_search": True})
        with pytest.raises(InvalidArgument, match="top_p is 2"):
            await worker.answer(sampling_options={"top_p": 2.0})

    worker.run(asks)


def test_numbers_that_are_none_are_the_engines_error(worker: AskedWorker) -> None:
    number_file(worker.folder, POISON)

    async def asks() -> None:
        with pytest.raises(Unknown, match=f"{POISON}.safetensors"):
            await worker.answer(f"{POISON}.safetensors")

    worker.run(asks)


def test_an_engine_that_fails_for_good_ends_its_worker(
    worker: AskedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []

    async def asks() -> None:
        def fails(*_: object) -> None:
            raise BackendError("the device was lost")

        monkeypatch.setattr(worker.engine, "execute", fails)
        monkeypatch.setattr("signal.raise_signal", signals.append)
        for _ in range(3):
            with pytest.raises((Unknown, EngineShutdown), match="device was lost"):
                await worker.answer()
        await comes(lambda: worker.worker._engine.is_lost)
        with pytest.raises(EngineShutdown, match="device was lost"):
            await worker.answer()

    worker.run(asks)
    assert signals


def test_metrics_say_what_is_in_use(worker: AskedWorker) -> None:
    snapshots: list[tuple[int, dict[str, Any]]] = []
    texts: list[Callable[[], str]] = []

    class Metrics:
        auto_labels = {"model": "m"}  # noqa: RUF012
        register_prometheus_expfmt_callback = staticmethod(texts.append)

    class Publisher:
        @staticmethod
        def publish(rank: int, snapshot: dict[str, Any]) -> None:
            snapshots.append((rank, snapshot))

    async def asks() -> None:
        assert worker.worker.component_metrics_dp_ranks() == [0]
        worker.worker.attach_snapshot_publisher(Publisher)
        await worker.worker.register_prometheus(Metrics)
        worker.engine.shut()
        running = asyncio.create_task(worker.answer(A1))
        await comes(lambda: snapshots and snapshots[-1][1]["gpu_cache_usage"] == 0.5)
        worker.engine.let()
        await running
        await comes(lambda: snapshots[-1][1]["kv_used_blocks"] == 0)
        assert snapshots[-1][1]["kv_total_blocks"] == worker.started.llm.total_kv_blocks

    worker.run(asks)
    assert 'trt_lora:adapter_copies_to_slot_total{model="m"} 1\n' in texts[0]()


def test_kept_prefixes_are_told_with_the_name_of_their_adapter(worker: AskedWorker) -> None:
    events: list[dict[str, Any]] = []

    class Publisher:
        publish_batch = staticmethod(events.extend)

    async def asks() -> None:
        (source,) = await worker.worker.kv_event_sources()
        source.on_ready(Publisher)
        await worker.answer(A1, 16)
        await comes(lambda: events)

    worker.run(asks)
    assert events[0]["type"] == "stored"
    assert events[0]["lora_name"] == A1
    assert events[0]["token_ids"][:3] == PROMPT


def test_the_front_end_is_told_the_engines_sizes_or_no_slots(worker: AskedWorker) -> None:
    async def looks() -> None:
        assert worker.config.discovery_backend == "file"
        assert worker.started.served_model_name == BASE
        assert worker.started.llm.max_num_seqs == 2
        assert worker.started.llm.max_gpu_lora_count is None
        await worker.told("load_lora", A1)

    worker.run(looks, "--discovery-backend", "file", "--max-gpu-lora-count", "0")
    assert worker.fake.registered[0]["max_gpu_lora_count"] is None
