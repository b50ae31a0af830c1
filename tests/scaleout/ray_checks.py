"""What Ray Serve over two replicas has to hold."""

# pyright: reportMissingImports=false
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import check_output

import aiohttp
import ray
from ray import serve
from scaleout.fleet import TOKENS, Fleet
from scaleout.streams import Asker, Stream

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
REQUESTS, AT_ONCE = 400, 8  # asked by Zipf's law, and how many at a time
SHORT, LONG = 800, 3000  # tokens of answers that last for seconds, and for a minute


async def until(what: str, is_so: object, seconds: float = 30.0) -> float:
    """Wait for a coroutine function to return true; return how long that took."""
    start = time.monotonic()
    while not await is_so():  # type: ignore[operator]
        assert time.monotonic() - start < seconds, what
        await asyncio.sleep(0.1)
    return time.monotonic() - start


async def is_same(asker: Asker, fleet: Fleet) -> None:
    """Every adapter answers as it does without a server, streamed and blended with nothing."""
    check(await asker.streams(list(fleet.answers), at_once=1), fleet)
    for name in list(fleet.answers)[1:4]:
        found = await asker.stream("base", lora=[{"name": name, "scale": 1.0}])
        assert found.tokens == fleet.answers[name]
    status, body = await asker.ask("GET", "/v1/models")
    assert (status, {card["id"] for card in body["data"]}) == (200, set(fleet.answers))


async def refuses(asker: Asker) -> None:
    """Errors are the server's own."""
    unknown = await asker.stream("nobody")
    assert (unknown.status, "nobody" in unknown.error) == (404, True)
    status, body = await asker.ask("POST", "/v1/completions", model="a", prompt="x", n=0)
    assert (status, body["error"]["code"]) == (400, 400)
    large = "x" * (5 << 20)
    assert (await asker.ask("POST", "/v1/completions", model="a", prompt=large))[0] == 413
    assert (await asker.ask("GET", "/nothing"))[0] == 404


async def loads_everywhere(asker: Asker, fleet: Fleet) -> None:
    """A load is every replica's, or nobody's; an unload too."""
    path = f"{fleet.folder}/a"
    status, told = await asker.ask("POST", LOAD, lora_name="x", lora_path=path)
    assert status == 200, told
    found = await asker.streams(["x"] * 16, at_once=16)
    assert all(stream.tokens == fleet.answers["a"] for stream in found)
    first, second = await _places(asker, "x")
    handle = serve.get_deployment_handle("RayReplica", "default")
    await handle.broadcast("undo", "x", {first: None}).results_async()
    status, told = await asker.ask("POST", LOAD, lora_name="x", lora_path=path)
    assert (status, second in told["error"]["message"]) == (400, True), told
    assert await _places(asker, "x") == [second]
    assert (await asker.ask("POST", UNLOAD, lora_name="x"))[0] == 200
    assert await _places(asker, "x") == []
    assert (await asker.stream("x")).status == 404


async def leaves(asker: Asker) -> None:
    """A client that leaves frees its row."""
    task = asyncio.create_task(asker.stream("a", tokens=4000))
    await until("it runs", lambda: _is(asker, "vllm:num_requests_running", 1))
    task.cancel()
    seconds = await until("it is gone", lambda: _is(asker, "vllm:num_requests_running", 0), 5)
    print(f"a client that leaves: its row is free after {seconds:.1f} s")


async def has_slots(asker: Asker, fleet: Fleet, skew: float) -> tuple[float, float]:
    """Ask by Zipf's law; return the share that met its adapter in a slot, and the median wait.

    The n-th adapter is wanted n ** -skew times as often as the first.
    """
    names = [name for name in fleet.answers if name != "base"]
    weights = [(rank + 1) ** -skew for rank in range(len(names))]
    wanted = random.Random(0).choices(names, weights, k=REQUESTS)
    await asker.streams(wanted[: REQUESTS // 4], AT_ONCE)
    before = await _loads(asker)
    found = await asker.streams(wanted, AT_ONCE)
    check(found, fleet)
    met = 1 - (await _loads(asker) - before) / REQUESTS
    return met, statistics.median(stream.first_s for stream in found)


async def fails_alone(asker: Asker, fleet: Fleet) -> None:
    """A replica that is killed takes its own answers with it, and no others."""
    names = [name for name in fleet.answers if name != "base"][:8]
    tasks = [asyncio.create_task(asker.stream(name, SHORT)) for name in names]
    await until("both run", lambda: _run_on_both(asker))
    path = f"{fleet.folder}/a"
    assert (await asker.ask("POST", LOAD, lora_name="x", lora_path=path))[0] == 200
    victim, *_ = await _all_places(asker)
    ray.kill(ray.get_actor(f"SERVE_REPLICA::default#RayReplica#{victim}", namespace="serve"))

    async def elsewhere(name: str) -> float:
        async def answers() -> bool:
            return (await asker.stream(name)).tokens == fleet.answers[name]

        return await until(name, answers, 10)

    seconds = max(await asyncio.gather(*map(elsewhere, names)))
    assert seconds < 10
    found = await asyncio.gather(*tasks)
    failed = [stream for stream in found if stream.error]
    assert 0 < len(failed) < len(names), failed
    assert all("gone" in stream.error for stream in failed)
    begun = [stream for stream in found if len(stream.tokens) >= TOKENS]
    check([replace(each, error="", tokens=each.tokens[:TOKENS]) for each in begun], fleet)
    print(f"killed: {len(failed)} of {len(names)} fail; all adapters answer after {seconds:.1f} s")

    async def are_two() -> bool:  # and the new one has what the other was told to load
        places = await _all_places(asker)
        return victim not in places and len(places) == 2 and await _places(asker, "x") == places

    print(f"killed: two replicas again after {await until('two', are_two, 60):.1f} s more")


async def front_end_ends(asker: Asker, fleet: Fleet) -> None:
    """Streams end with the ingress, their rows are free, and the next one answers."""
    names = [name for name in fleet.answers if name != "base"][:8]
    tasks = [asyncio.create_task(asker.stream(name, LONG)) for name in names]
    await until("both run", lambda: _run_on_both(asker))
    (ingress,) = [actor for actor in _actors() if "#Ingress#" in actor]
    ray.kill(ray.get_actor(ingress, namespace="serve"), no_restart=False)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [each for each in found if isinstance(each, Stream) and len(each.tokens) == LONG]
    seconds = await until("it answers", lambda: _answers(asker, names, fleet), 60)
    freed = await until("rows are free", lambda: _is(asker, "vllm:num_requests_running", 0), 10)
    print(f"ingress killed: answers after {seconds:.1f} s, rows free after {freed:.1f} s more")


async def hangs(asker: Asker, fleet: Fleet) -> None:
    """A replica whose engine hangs is replaced; what the other one has answers meanwhile."""
    before = await _all_places(asker)
    os.kill(_engine_of_a_replica(), signal.SIGSTOP)

    async def is_replaced() -> bool:
        places = await _all_places(asker)
        return len(places) == 2 and places != before

    seconds = await until("another replica", is_replaced, 180)
    check(await asker.streams(list(fleet.answers), at_once=4), fleet)
    print(f"an engine that hangs: its replica is another after {seconds:.0f} s")


def _actors() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def _engine_of_a_replica() -> int:
    """The process of an engine: the child of a replica's."""
    lines = check_output(["ps", "-eo", "pid,ppid,args"], text=True).splitlines()
    rows = [line.split(None, 2) for line in lines]
    replicas = {pid for pid, _, words in rows if "RayReplica" in words}
    return next(int(pid) for pid, parent, _ in rows if parent in replicas)


async def _answers(asker: Asker, names: list[str], fleet: Fleet) -> bool:
    try:
        found = await asker.streams(names, at_once=2)
    except (aiohttp.ClientError, TimeoutError):
        return False
    return all(stream.tokens == fleet.answers[stream.model] for stream in found)


async def churns(asker: Asker, fleet: Fleet, seconds: float) -> None:
    """Load, unload, cancel, ask: every text is the one of its adapter."""
    end, rng, count = time.monotonic() + seconds, random.Random(1), 0

    async def asks() -> None:
        nonlocal count
        while time.monotonic() < end:
            name = rng.choice(list(fleet.answers))
            call = asyncio.create_task(asker.stream(name))
            if rng.random() < 0.1:
                await asyncio.sleep(0.02)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                continue
            check([await call], fleet)
            count += 1

    async def changes() -> None:
        while time.monotonic() < end:
            name = rng.choice("abcd")
            path = f"{fleet.folder}/{name}"
            assert (await asker.ask("POST", LOAD, lora_name="x", lora_path=path))[0] == 200
            for stream in await asker.streams(["x"] * 4, 4):
                assert stream.tokens == fleet.answers[name]
            assert (await asker.ask("POST", UNLOAD, lora_name="x"))[0] == 200

    await asyncio.gather(changes(), *(asks() for _ in range(8)))
    print(f"churn: {count} answers in {seconds:.0f} s, none with a wrong token")


async def drains(asker: Asker, fleet: Fleet, redeploy: Callable[[], object]) -> None:
    """A replica that shall go ends its answers first."""
    names = [name for name in fleet.answers if name != "base"][:8]
    tasks = [asyncio.create_task(asker.stream(name, LONG)) for name in names]
    await until("both run", lambda: _run_on_both(asker))
    await asyncio.to_thread(redeploy)
    found = await asyncio.gather(*tasks)
    assert all(stream.status == 200 and not stream.error for stream in found), found
    assert all(len(stream.tokens) == LONG for stream in found)
    print(f"drained: {len(found)} answers of {LONG} tokens are whole")


async def scales(asker: Asker, fleet: Fleet) -> None:
    """A second replica comes when it is needed, and goes when it is not; no answer is lost."""
    names = [name for name in fleet.answers if name != "base"][:8]
    tasks = [asyncio.create_task(asker.stream(name, LONG)) for name in names]

    async def are(count: int) -> bool:
        check([await asker.stream("a")], fleet)
        return len(await _all_places(asker)) == count

    up = await until("two replicas", lambda: are(2), 90)
    found = await asyncio.gather(*tasks)
    assert all(stream.status == 200 and not stream.error for stream in found), found
    down = await until("one replica", lambda: are(1), 120)
    print(
        f"scaled: a second replica after {up:.0f} s, one again {down:.0f} s after the last answer"
    )


async def most_stats() -> int:
    """How many bytes a replica tells the routers, most."""
    handle = serve.get_deployment_handle("RayReplica", "default")
    found = await handle.broadcast("record_routing_stats").results_async()
    return max(len(json.dumps(stats)) for stats in found)


def many_adapters(fleet: Fleet, folder: Path, count: int) -> Path:
    """Write a folder of so many adapters."""
    for number in range(count):
        shutil.copytree(f"{fleet.folder}/a", folder / f"n{number}")
    return folder


def check(streams: list[Stream], fleet: Fleet) -> None:
    """Every answer is its adapter's."""
    for stream in streams:
        assert (stream.status, stream.error) == (200, ""), stream
        assert stream.tokens == fleet.answers[stream.model], stream


async def _run_on_both(asker: Asker) -> bool:
    """Whether both replicas have requests in rows: each has four."""
    return await asker.series("vllm:num_requests_running") > 4


async def _is(asker: Asker, name: str, value: float) -> bool:
    return await asker.series(name) == value


async def _loads(asker: Asker) -> float:
    """How many adapters were copied into slots."""
    found = await asker.series("trt_lora:adapter_loads_total", 'level="slot"')
    assert found > 0  # else the metric has another name, and every request met its adapter
    return found


async def _places(asker: Asker, name: str) -> list[str]:
    """The replicas that have an adapter."""
    data = (await asker.ask("GET", "/v1/lora_adapters"))[1]["data"]
    return sorted(known["replica"] for known in data if known["name"] == name)


async def _all_places(asker: Asker) -> list[str]:
    data = (await asker.ask("GET", "/v1/lora_adapters"))[1].get("data", [])
    return sorted({known["replica"] for known in data})
