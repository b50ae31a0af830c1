"""Ray Serve over two replicas: answers, changes of adapters, slots, losses, churn and speed."""

# pyright: reportMissingImports=false
import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import ray
from ray import serve
from ray.serve.request_router import PendingRequest, RunningReplica
from scaleout import ray_checks as checks
from scaleout.fleet import Fleet, told_fleet
from scaleout.ray_speed import is_fast
from scaleout.streams import Asker
from support.ports import free_port

from trt_lora.runtime.scaleout import ray_serve
from trt_lora.runtime.scaleout.ray_serve import ResidencyRouter

PORT = free_port()
# Of Ray, as docs/scale-out.md says; the last: nothing is sent to anybody.
SWITCHES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CHURN_S, MANY, SKEWS = 60.0, 1000, (1.1, 1.5, 2.0)


class RandomRouter(ResidencyRouter):
    """One that looks at nothing."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates by chance, unless one is asked for."""
        if pending_request is not None and pending_request.args[0].replica:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [[each] for each in random.sample(candidate_replicas, len(candidate_replicas))]


def application(engine: str, folder: str, **options: object) -> serve.Application:
    """Two replicas, unless options say otherwise."""
    fixed = {"served_model_name": "base", "backend": "onnxruntime", "num_cpus": 0.1}
    fixed |= {"allow_runtime_lora_updating": True, "lora_root": folder, "replicas": 2}
    return ray_serve.trt_lora_app(engine, folder, **{**fixed, **options})


@asynccontextmanager
async def served(
    engine: str, folder: str, router: type = ResidencyRouter, **options: object
) -> AsyncIterator[Asker]:
    """Serve an engine by two replicas until the end of the block."""
    start = time.monotonic()
    with patch.object(ray_serve, "ResidencyRouter", router):
        made = application(engine, folder, **options)
    await asyncio.to_thread(serve.run, made)
    print(f"ready after {time.monotonic() - start:.1f} s")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Asker(session, f"http://127.0.0.1:{PORT}")
    await asyncio.to_thread(serve.delete, "default")


async def run(fleet: Fleet) -> None:
    """Check everything, and print what was measured."""
    async with served(fleet.few, fleet.folder) as asker:
        await checks.is_same(asker, fleet)
        await checks.refuses(asker)
        await checks.loads_everywhere(asker, fleet)
        await checks.leaves(asker)
        found = {skew: await checks.has_slots(asker, fleet, skew) for skew in SKEWS}
        await checks.churns(asker, fleet, CHURN_S)
        await checks.fails_alone(asker, fleet)
        await checks.front_end_ends(asker, fleet)
        await checks.hangs(asker, fleet)
        less = application(fleet.few, fleet.folder, replicas=1)
        await checks.drains(asker, fleet, lambda: serve.run(less))
    async with served(fleet.few, fleet.folder, router=RandomRouter) as asker:
        by_chance = {skew: await checks.has_slots(asker, fleet, skew) for skew in SKEWS}
    async with served(fleet.many, fleet.folder, replicas=1) as asker:
        alone = {skew: await checks.has_slots(asker, fleet, skew) for skew in SKEWS}
    for skew, (met, wait) in found.items():
        print(
            f"16 adapters by Zipf's law of {skew}, 2 x 4 slots: {met:.1%} met theirs in a slot, "
            f"{by_chance[skew][0]:.1%} by chance; first token {wait * 1e3:.0f} ms, "
            f"{wait / alone[skew][1]:.2f} of one replica with all in slots"
        )
    elastic: dict[str, Any] = {"replicas": 1, "max_replicas": 2, "target_requests": 2}
    elastic |= {"upscale_delay": 1.0, "downscale_delay": 3.0}
    async with served(fleet.few, fleet.folder, **elastic) as asker:
        await checks.scales(asker, fleet)
    with tempfile.TemporaryDirectory() as folder:
        many = checks.many_adapters(fleet, Path(folder), MANY)
        async with served(fleet.few, str(many)) as asker:
            assert (await asker.stream(f"n{MANY - 1}")).tokens == fleet.answers["a"]
            print(f"{MANY} adapters: replicas tell routers {await checks.most_stats()} bytes")
    async with served(fleet.real, fleet.real_folder, max_num_seqs=8) as asker:
        await is_fast(asker, fleet)


if __name__ == "__main__":
    os.environ |= SWITCHES
    ray.init(_node_ip_address="127.0.0.1", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    asyncio.run(run(told_fleet()))
    serve.shutdown()
    ray.shutdown()
