"""Ray Serve over two replicas: answers, changes of adapters, slots, losses, churn and speed."""

# pyright: reportMissingImports=false
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import ray
from ray import serve
from scaleout import ray_checks as checks
from scaleout.fleet import Fleet, told_fleet
from scaleout.ray_speed import is_fast
from scaleout.streams import Asker
from support.ports import free_port

from trt_lora.runtime.scaleout.ray_serve import trt_lora_app

PORT = free_port()
CHURN_S, MANY = 60.0, 1000


@asynccontextmanager
async def served(engine: str, folder: str, **options: object) -> AsyncIterator[Asker]:
    """Serve an engine by two replicas until the end of the block."""
    fixed = {"served_model_name": "base", "backend": "onnxruntime", "num_cpus": 0.1}
    fixed |= {"allow_runtime_lora_updating": True, "lora_root": folder, "replicas": 2}
    start = time.monotonic()
    await asyncio.to_thread(serve.run, trt_lora_app(engine, folder, **{**fixed, **options}))
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
        met, wait = await checks.has_slots(asker, fleet)
        await checks.churns(asker, fleet, CHURN_S)
        await checks.fails_alone(asker, fleet)
    async with served(fleet.many, fleet.folder, replicas=1) as asker:
        _, alone = await checks.has_slots(asker, fleet)
    print(f"16 adapters, 2 x 4 slots: {met:.1%} met theirs in a slot; first token {wait * 1e3:.0f}")
    print(f"ms, {wait / alone:.2f} of one replica with all of them in slots")
    with tempfile.TemporaryDirectory() as folder:
        many = checks.many_adapters(fleet, Path(folder), MANY)
        async with served(fleet.few, str(many)) as asker:
            assert (await asker.stream(f"n{MANY - 1}")).tokens == fleet.answers["a"]
    async with served(fleet.real, fleet.real_folder, max_num_seqs=8) as asker:
        await is_fast(asker, fleet)


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent to anybody
    ray.init(_node_ip_address="127.0.0.1", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    asyncio.run(run(told_fleet()))
    serve.shutdown()
    ray.shutdown()
