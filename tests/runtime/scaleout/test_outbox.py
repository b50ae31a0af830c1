"""Messages of a step leave together, and a stream ends that nobody needs."""

import asyncio

import pytest

from trt_lora.runtime.scaleout import outbox
from trt_lora.runtime.scaleout.outbox import Outbox


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is ten milliseconds here."""
    monkeypatch.setattr(outbox, "_IDLE_S", 0.01)
    monkeypatch.setattr(outbox, "_UNHEARD_S", 0.01)


async def taken(found: Outbox[int]) -> list[list[int]]:
    return [batch async for batch in found.batches()]


def test_what_the_rows_of_a_step_write_is_one_batch() -> None:
    async def run() -> list[list[int]]:
        found, begins = Outbox[int](), asyncio.Event()
        taking = asyncio.create_task(taken(found))

        async def row(number: int) -> None:
            await begins.wait()
            found.put(number)
            await asyncio.sleep(0)
            found.put(10 + number)

        rows = [asyncio.create_task(row(number)) for number in range(4)]
        await asyncio.sleep(0)
        begins.set()
        await asyncio.gather(*rows)
        return await taking

    assert asyncio.run(run()) == [[0, 1, 2, 3, 10, 11, 12, 13]]


def test_a_stream_lasts_as_long_as_a_request_and_its_last_words() -> None:
    async def run() -> list[list[int]]:
        found = Outbox[int]()
        found.requests += 1
        taking = asyncio.create_task(taken(found))
        await asyncio.sleep(0.05)
        assert not taking.done()
        found.put(1)
        found.requests -= 1
        return await asyncio.wait_for(taking, 5)

    assert asyncio.run(run()) == [[1]]


def test_one_that_nobody_listens_to_is_lost() -> None:
    async def run() -> None:
        found = Outbox[int]()
        assert not found.is_lost
        await asyncio.sleep(0.02)
        assert found.is_lost
        await taken(found)
        assert not found.is_lost

    asyncio.run(run())
