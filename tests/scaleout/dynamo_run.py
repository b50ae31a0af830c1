"""Dynamo's front end over two workers: every answer is the engine's own, whoever gives it."""
# pyright: reportMissingImports=false

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clients.served import MESSAGES, PROMPT, Served, told
from openai import APIStatusError, OpenAI
from scaleout.dynamo_cluster import BASE, DynamoCluster
from scaleout.stream_load import HEADER, Load, loaded, streamed
from support.eventually import eventually

from trt_lora.runtime import Engine, SamplingParams, StructuredOutputsParams, open_engine

MOST, MANY = 12, 200  # tokens, requests
LONG = 400  # tokens of an answer that is under way when something happens
SCHEMA = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
AS_IDS = {"return_tokens_as_token_ids": True}
USAGE = "dynamo_component_gpu_cache_usage_percent"


class Truth:
    """What the engine answers to the prompt, without Dynamo."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine with its adapters."""
        self._engine = engine
        self._greedy: dict[tuple[str, int], list[int]] = {}

    def greedy(self, name: str, most: int = MOST) -> list[int]:
        """Return the tokens of a completion that ends at its length alone."""
        if (name, most) not in self._greedy:
            sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            self._greedy[name, most] = self.completion(name, sampling)
        return self._greedy[name, most]

    def completion(self, name: str, sampling: SamplingParams) -> list[int]:
        """Return the tokens of a completion."""
        ids = self._engine.tokenizer.encode_text(PROMPT, special_tokens=True)
        return self._tokens(ids, name, sampling)

    def chat(self, name: str, sampling: SamplingParams) -> list[int]:
        """Return the tokens of an answer to the messages."""
        return self._tokens(MESSAGES, name, sampling)

    def _tokens(self, prompt: Any, name: str, sampling: SamplingParams) -> list[int]:
        adapter = None if name == BASE else name
        return list(self._engine.generate(prompt, adapter=adapter, sampling=sampling).token_ids)


def ids_of(names: Sequence[str]) -> list[int]:
    """Return tokens that are called by their numbers."""
    return [int(name.removeprefix("token_id:")) for name in names]


def within(seconds: float, condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, and say how long it took."""
    start = time.monotonic()
    assert eventually(condition, seconds), f"{what}: not within {seconds} s"
    print(f"{what}: after {time.monotonic() - start:.1f} s")


def status_of(client: OpenAI, model: str, **body: Any) -> tuple[int, str]:
    """Return how a request is refused; 200 where it is not."""
    try:
        client.completions.create(model=model, prompt=PROMPT, max_tokens=2, **body)
    except APIStatusError as error:
        return error.status_code, str(error.body)
    return 200, ""


def asks_by_client(client: OpenAI, truth: Truth, names: Sequence[str]) -> None:
    """Whole answers and streams of completions and chats, drawn ones and those with a schema."""
    fields: dict[str, Any] = {"max_tokens": MOST, "temperature": 0}
    drawn: dict[str, Any] = {"max_tokens": MOST, "temperature": 1, "seed": 7}
    for name in names:
        for how in (fields, drawn):
            expected = truth.completion(name, SamplingParams(**how))
            asked: dict[str, Any] = {"model": name, "prompt": PROMPT, "logprobs": 0, **how}
            whole = client.completions.create(**asked, extra_body=AS_IDS)
            assert ids_of(whole.choices[0].logprobs.tokens) == expected, name
            events = client.completions.create(**asked, stream=True, extra_body=AS_IDS)
            parts = [event.choices[0].logprobs for event in events if event.choices]
            assert [i for part in parts if part for i in ids_of(part.tokens)] == expected, name
        asked = {"model": name, "messages": MESSAGES, "logprobs": True, **fields}
        expected = truth.chat(name, SamplingParams(**fields))
        chat = client.chat.completions.create(**asked, extra_body=AS_IDS)
        assert ids_of([t.token for t in chat.choices[0].logprobs.content]) == expected, name
        pieces = client.chat.completions.create(**asked, stream=True, extra_body=AS_IDS)
        known = [piece.choices[0].logprobs for piece in pieces if piece.choices]
        assert ids_of([t.token for k in known if k for t in k.content or []]) == expected, name


def asks_for_what_is_special(client: OpenAI, truth: Truth, name: str) -> None:
    """A schema, several answers, stop strings; and what is refused says its name."""
    guide = SamplingParams(
        temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    whole = client.completions.create(
        model=name,
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        logprobs=0,
        extra_body=AS_IDS | {"guided_json": SCHEMA},
    )
    assert ids_of(whole.choices[0].logprobs.tokens) == truth.completion(name, guide)
    several = client.completions.create(model=name, prompt=PROMPT, max_tokens=4, n=2, seed=3)
    assert sorted(choice.index for choice in several.choices) == [0, 1]
    regex = {"guided_regex": "abcdefgh"}
    stopped = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=8, stop=["def"], extra_body=regex
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("abc", "stop")
    for field in ({"best_of": 2}, {"bad_words_token_ids": [[3]]}, {"guided_regex": "((("}):
        status, message = status_of(client, name, extra_body=field)
        assert status == 400
        assert next(iter(field)).removeprefix("guided_") in message


def everyone_is_answered(cluster: DynamoCluster, truth: Truth, names: Sequence[str]) -> Load:
    """Many requests for all names, few of which are asked for often; each by its adapter."""
    draws, weights = random.Random(4), [1 / (rank + 1) for rank in range(len(names))]
    models = [*names, *draws.choices(names, weights, k=MANY - len(names))]
    draws.shuffle(models)
    load = loaded(cluster.address, models, MOST, threads=8)
    for model, answer in zip(models, load.answers, strict=True):
        assert (answer.tokens, answer.end) == (truth.greedy(model), "length"), (model, answer)
    return load


def in_use(cluster: DynamoCluster) -> float:
    """Which part of both workers' rows has a request."""
    return sum(cluster.metric(worker, USAGE) for worker in (0, 1))


def publishes(cluster: DynamoCluster, names: Sequence[str]) -> None:
    """Load each name on one of the workers, in turns."""
    for place, name in enumerate(names):
        status, answer = cluster.load(place % 2, name)
        assert (status, answer["status"]) == (200, "success"), answer
    assert eventually(lambda: {BASE, *names} <= set(cluster.models())), cluster.models()


def unloads(cluster: DynamoCluster, client: OpenAI, truth: Truth, name: str) -> None:
    """What is under way is answered to its end; then the name is unknown."""
    with ThreadPoolExecutor(3) as pool:
        under_way = [pool.submit(streamed, cluster.address, name, LONG) for _ in range(3)]
        assert eventually(lambda: in_use(cluster))
        assert cluster.unload(0, name)[0] == 200
        within(2, lambda: status_of(client, name)[0] == 404, "404 for what was unloaded")
        for answer in under_way:
            found = answer.result()
            assert (found.tokens, found.end) == (truth.greedy(name, LONG), "length")
    assert cluster.unload(0, name)[0] == 500  # it is not there any more
    publishes(cluster, [name])


def a_client_leaves(cluster: DynamoCluster, client: OpenAI, name: str) -> None:
    """Its row is free soon, long before its answer would have ended."""
    endless = {"ignore_eos": True}
    events = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=3000, stream=True, extra_body=endless
    )
    pieces = iter(events)
    next(pieces)
    assert eventually(lambda: in_use(cluster))
    events.close()
    within(3, lambda: not in_use(cluster), "row of a client that has left is free")


def one_refuses(cluster: DynamoCluster, truth: Truth, names: Sequence[str]) -> None:
    """What one of two workers cannot load is its adapter's answer, or an error that names it."""
    for name in names:
        assert cluster.load(0, name)[0] == 200
        status, refusal = cluster.load(1, name)
        assert (status, refusal["status"]) == (500, "error"), refusal
        assert name in refusal["message"]
    assert eventually(lambda: set(names) <= set(cluster.models()))
    load = loaded(cluster.address, list(names) * 3, MOST, threads=4)
    refused = 0
    for name, answer in zip(list(names) * 3, load.answers, strict=True):
        if answer.end == "length":
            assert answer.tokens == truth.greedy(name)
        else:
            refused += 1
            assert name in answer.end, answer
            assert not answer.tokens
    print(f"answers of a worker that cannot load the adapter: {refused} errors, 0 of the base")


def the_front_end_restarts(cluster: DynamoCluster, truth: Truth, name: str) -> None:
    """Streams end, their rows are free, and another front end knows all names."""
    before = set(cluster.models())
    with ThreadPoolExecutor(2) as pool:
        under_way = [pool.submit(streamed, cluster.address, name, 3000) for _ in range(2)]
        assert eventually(lambda: in_use(cluster))
        cluster.end_front()
        assert all(answer.result().end != "length" for answer in under_way)
    within(5, lambda: not in_use(cluster), "rows of a front end that was killed are free")
    cluster.start_front()
    assert eventually(lambda: set(cluster.models()) == before), cluster.models()
    assert streamed(cluster.address, name, MOST).tokens == truth.greedy(name)


def workers_end(cluster: DynamoCluster, truth: Truth, first: str, second: str) -> None:
    """The names of one that hangs or is killed are retracted; the other one answers on."""
    with cluster.hanging(1):
        within(
            15, lambda: not cluster.is_healthy(1), "an engine that hangs makes its worker unwell"
        )
    within(15, lambda: cluster.is_healthy(1), "an engine that goes on makes it well")
    cluster.workers[1].send_signal(signal.SIGSTOP)
    within(15, lambda: second not in cluster.models(), "names of a worker that hangs are gone")
    assert streamed(cluster.address, first, MOST).tokens == truth.greedy(first)
    cluster.restart_worker(1)
    assert eventually(lambda: cluster.load(1, second)[0] == 200)
    assert eventually(lambda: second in cluster.models())
    cluster.workers[1].kill()
    within(15, lambda: second not in cluster.models(), "names of a worker that was killed are gone")
    for name in (first, BASE):
        assert streamed(cluster.address, name, MOST).tokens == truth.greedy(name)
    cluster.workers[0].terminate()
    assert cluster.workers[0].wait(60) == 0
    assert eventually(lambda: not cluster.models())


def copied(served: Served, folder: Path) -> list[str]:
    """Copy all adapters into a folder of ours; return the names of the sixteen."""
    many = Path(served.engine).with_name("many")
    shutil.copytree(many, folder)
    for name, path in served.adapters.items():
        shutil.copytree(path, folder / name)
    return sorted(path.name for path in many.iterdir())


def damage(folder: Path, names: Sequence[str]) -> None:
    """Cut off the weights of adapters."""
    for name in names:
        weights = folder / name / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])


def measured(cluster: DynamoCluster, served: Served, share: str, load: Load) -> None:
    """Print how fast both are with what one server has in its two slots."""
    models = [BASE, *served.adapters] * 16
    loaded(served.address, models[:6], 24, threads=6)
    loaded(cluster.address, models[:6], 24, threads=6)
    print(HEADER)
    print(loaded(served.address, models, 24, threads=6).row("one server alone, 3 names", "all"))
    print(loaded(cluster.address, models, 24, threads=6).row("Dynamo, 2 workers, 3 names", "-"))
    print(load.row("Dynamo, 2 workers, 16 names, 2 x 2 slots", share))


def main() -> None:
    """Run all bars, and print what was measured."""
    served, here = told(), Path.cwd()
    names = copied(served, here / "loras")
    odd, good = names[:6], names[6:]
    shutil.copytree(here / "loras", here / "others")
    with open_engine(served.engine, "onnxruntime") as engine:
        for name in (*names, *served.adapters):
            engine.adapters.load(name, here / "loras" / name)
        truth = Truth(engine)
        with DynamoCluster(here / "first", served.engine, [here / "loras"] * 2) as cluster:
            try:
                shares_a_folder(cluster, truth, served, names)
            except BaseException:
                print(cluster.log)
                raise
        damage(here / "others", odd)
        loras, words = [here / "loras", here / "others"], ("--max-gpu-lora-count", "0")
        with DynamoCluster(here / "second", served.engine, loras, *words) as cluster:
            try:
                publishes(cluster, good)
                everyone_is_answered(cluster, truth, good)
                one_refuses(cluster, truth, odd)
                the_front_end_restarts(cluster, truth, good[0])
                workers_end(cluster, truth, good[0], good[1])
            except BaseException:
                print(cluster.log)
                raise


def shares_a_folder(
    cluster: DynamoCluster, truth: Truth, served: Served, names: Sequence[str]
) -> None:
    """What holds while both workers follow one folder."""
    client = OpenAI(base_url=f"{cluster.address}/v1", api_key="none", max_retries=0)
    assert status_of(client, names[0])[0] == 404
    publishes(cluster, names)
    copies = "trt_lora:adapter_copies_to_slot_total"
    before = sum(cluster.metric(worker, copies) for worker in (0, 1))
    load = everyone_is_answered(cluster, truth, names)
    missed = sum(cluster.metric(worker, copies) for worker in (0, 1)) - before
    publishes(cluster, list(served.adapters))
    asks_by_client(client, truth, [BASE, *served.adapters, *names[:2]])
    asks_for_what_is_special(client, truth, names[0])
    unloads(cluster, client, truth, names[0])
    a_client_leaves(cluster, client, names[0])
    measured(cluster, served, f"{100 * (1 - missed / MANY):.0f} %", load)
    print(json.dumps({"models": len(cluster.models())}))


if __name__ == "__main__":
    main()
