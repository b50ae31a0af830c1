"""The real Triton over two models: every way to ask, every answer as the engine's own."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clients.served import PROMPT, Served, told
from safetensors.numpy import load_file, save_file
from scaleout.triton_client import Answered, generated, metric, posted, streaming
from scaleout.triton_server import Triton, put_model, triton_server
from scaleout.triton_speed import print_speed
from support.eventually import eventually

from trt_lora.runtime import Engine, SamplingParams, open_engine
from trt_lora.runtime.interfaces.trtllm import PeftCacheManager, TrtllmLoraRequest

FEW: dict[str, Any] = {"max_tokens": 12, "sampling_parameters": '{"temperature": 0}'}
LONG: dict[str, Any] = {"max_tokens": 3000, "sampling_parameters": '{"ignore_eos": true}'}
MODULES = {"q_proj": 1, "v_proj": 3}  # TensorRT-LLM's numbers
HOST_BYTES = 10_000  # of an adapter of rank 4 or 8, and not of both
FLAT = {"max_batch_size: 1": "max_batch_size: 0"}  # shapes as for vLLM's backend


@dataclass(frozen=True)
class Own:
    """What the engine answers by itself."""

    engine: Engine

    def answer(self, adapter: str | None) -> tuple[str, list[int]]:
        ids = self.engine.tokenizer.encode_text(PROMPT, special_tokens=True)
        sampling = SamplingParams(temperature=0, max_tokens=12)
        found = self.engine.generate(ids, adapter=adapter, sampling=sampling).token_ids
        return self.engine.tokenizer.decode(found), list(found)


def is_own(answer: Answered, own: Own, adapter: str | None) -> bool:
    """Whether an answer is the engine's, and whole."""
    assert not answer.error, answer.error
    expected = own.answer(adapter)
    assert (answer.text, answer.ids) == expected, (adapter, answer, expected)
    return answer.finish_reason == "length"


def task_arrays(adapter: str) -> tuple[Any, Any]:
    """An adapter's weights and their config in TensorRT-LLM's format."""
    tensors = load_file(f"{adapter}/adapter_model.safetensors")
    rows, config = [], []
    for name, a in tensors.items():
        if ".lora_A." in name:
            parts = name.split(".")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            rows.append(np.concatenate([a.ravel(), b.ravel()]))
            layer = int(parts[parts.index("layers") + 1])
            config.append([MODULES[parts[-3]], layer, a.shape[0]])
    width = max(row.size for row in rows)
    weights = np.stack([np.pad(row, (0, width - row.size)) for row in rows])
    return weights.astype(np.float16), np.array(config, np.int32)


def asks_over_http(triton: Triton, own: Own, names: list[str]) -> None:
    """Base and adapters, whole and token by token, from both models."""
    counts = []
    for model in ("letters", "flat"):
        for name in ("", *names):
            asked = {"text_input": PROMPT, "lora_name": name, **FEW}
            whole = generated(triton, model, **asked)
            pieces = generated(triton, model, stream=True, **asked)
            assert is_own(whole, own, name or None)
            assert is_own(pieces, own, name or None)
            assert whole.responses == 1
            counts.append(pieces.responses)
    # A response has what has come since the one before: all tokens, where the engine is quick.
    assert len(counts) < sum(counts) <= 12 * len(counts)
    listed = generated(
        triton, "flat", input_ids=[5, 6], sampling_parameters='{"logprobs": 2, "max_tokens": "3"}'
    )
    assert [len(each) for each in listed.logprobs] == [2, 2, 2]


def asks_over_grpc(triton: Triton, own: Own, names: list[str]) -> None:
    """All at once in one stream, each to its empty last response."""
    with streaming(triton) as stream:
        asked = {
            name: stream.ask("letters", text_input=PROMPT, lora_name=name, stream=True, **FEW)
            for name in ("", *names)
        }
        for name, answer in asked.items():
            assert is_own(stream.whole(answer), own, name or None)
            assert 1 <= answer.responses <= 12


def sends_tasks(triton: Triton, own: Own, adapters: Mapping[str, str]) -> None:
    """Weights once and then the id; what was never sent, and what was evicted, says so."""
    tasks = PeftCacheManager(own.engine.adapters)
    sent = {number: task_arrays(path) for number, path in enumerate(adapters.values(), 7)}
    expected = {
        number: tasks.take_in(TrtllmLoraRequest(number, *arrays)) for number, arrays in sent.items()
    }
    first, second = sent
    with streaming(triton) as stream:

        def ask(number: int, **more: Any) -> Answered:
            asked = stream.ask("letters", text_input=PROMPT, lora_task_id=number, **FEW, **more)
            return stream.whole(asked)

        def weights(number: int) -> dict[str, Any]:
            return dict(zip(("lora_weights", "lora_config"), sent[number], strict=True))

        missing = "not found in cache. Please send LoRA weights with request"
        assert missing in ask(first).error
        assert is_own(ask(first, **weights(first)), own, expected[first])
        assert is_own(ask(first), own, expected[first])
        assert "other weights" in ask(first, **weights(second)).error
        assert is_own(ask(second, **weights(second)), own, expected[second])
        assert missing in ask(first).error, "there is room for one"
        assert is_own(ask(first, **weights(first)), own, expected[first])


def errs(triton: Triton, own: Own, folder: Path, adapter: str) -> None:
    """A request's error is its own: one that runs meanwhile is answered as alone."""
    wild = shutil.copytree(adapter, folder / ".wild")
    tensors = load_file(wild / "adapter_model.safetensors")
    save_file(
        {n: t * np.float32(1e25) for n, t in tensors.items()}, wild / "adapter_model.safetensors"
    )
    wild.rename(folder / "wild")  # published while the server runs
    (folder / "half").mkdir()
    with streaming(triton) as stream:
        running = stream.ask("letters", text_input=PROMPT, lora_name="a", stream=True, **FEW)
        for expected, asked in (
            ("wild", {"lora_name": "wild"}),
            ("nobody", {"lora_name": "nobody"}),
            ("holds no adapter", {"lora_name": "half"}),
            ("characters that a name cannot have", {"lora_name": "../a"}),
            ("'tempratur' is no sampling parameter", {"tempratur": 0}),
            ("no JSON", {"sampling_parameters": "{"}),
            ("temperature", {"temperature": -1}),
            ("tools is not supported", {"sampling_parameters": '{"tools": [1]}'}),
        ):
            answer = generated(triton, "letters", text_input=PROMPT, **asked)
            assert expected in answer.error, (expected, answer)
        for expected, prompt in (
            ("is empty", {"input_ids": []}),
            ("9999", {"input_ids": [9999]}),
            ("text_input or input_ids", {}),
        ):
            status, text = posted(triton, "models/letters/generate", max_tokens=1, **prompt)
            assert status == 400, text
            assert expected in text or prompt == {"input_ids": []}, text
        assert is_own(stream.whole(running), own, "a")


def leaves(triton: Triton) -> None:
    """A client that cancels frees its rows: who waits for one is answered."""
    flat, ended = {"model_name": "flat"}, {"model_name": "flat", "finished_reason": "abort"}

    def shows(name: str, value: float, **labels: str) -> bool:
        return eventually(lambda: metric(triton, f"vllm:{name}", **labels) == [value])

    with streaming(triton, ()) as patient:
        with streaming(triton, ()) as leaving:
            for _ in range(2):
                leaving.ask("flat", text_input=PROMPT, stream=True, **LONG)
            assert shows("num_requests_running", 2, **flat)
            held = patient.ask("flat", text_input=PROMPT, **FEW)
            assert shows("num_requests_waiting", 1, **flat)
        assert patient.whole(held).finish_reason == "length"
    assert shows("request_success_total", 2, **ended)
    assert shows("num_requests_running", 0, **flat)


def loads_and_unloads(triton: Triton, own: Own) -> None:
    """A model leaves and comes back; the other one does not notice."""

    def index() -> dict[str, str]:
        _, text = posted(triton, "repository/index")
        return {each["name"]: each.get("state", "") for each in json.loads(text)}

    assert posted(triton, "repository/models/flat/unload")[0] == 200
    assert eventually(lambda: index()["flat"] == "UNAVAILABLE")
    _, text = posted(triton, "models/flat/generate", text_input=PROMPT)
    assert "unknown model" in text, text
    assert is_own(generated(triton, "letters", text_input=PROMPT, **FEW), own, None)
    assert posted(triton, "repository/models/flat/load")[0] == 200
    assert index() == {"letters": "READY", "flat": "READY"}
    assert is_own(generated(triton, "flat", text_input=PROMPT, **FEW), own, None)


def tells_metrics(triton: Triton) -> None:
    """Each model by its own label; residents in one series."""
    (info,) = metric(triton, "vllm:lora_requests_info", model_name="letters")
    assert info > 1.7e9
    for name, labels in (
        ("trt_lora:adapters", {"level": "slot"}),
        ("trt_lora:adapter_loads_total", {"level": "slot"}),
        ("vllm:generation_tokens_total", {}),
        ("vllm:request_success_total", {"finished_reason": "error"}),
    ):
        (value,) = metric(triton, name, model_name="letters", **labels)
        assert value > 0, name


def checks(triton: Triton, own: Own, served: Served, folder: Path) -> None:
    names = list(served.adapters)
    asks_over_http(triton, own, names)
    asks_over_grpc(triton, own, names)
    sends_tasks(triton, own, served.adapters)
    errs(triton, own, folder, served.adapters["a"])
    leaves(triton)
    loads_and_unloads(triton, own)
    tells_metrics(triton)


if __name__ == "__main__":
    its = told()
    place = Path(tempfile.mkdtemp(dir=".")).resolve()
    home = Path(shutil.copytree(Path(its.adapters["a"]).parent, place / "adapters"))
    paths = {"engine": its.engine, "adapters": str(home)}
    cached = {"lora_cache_host_memory_bytes": str(HOST_BYTES)}
    put_model(place / "models" / "letters", paths | cached)
    put_model(place / "models" / "flat", paths | {"rows": "2"}, FLAT)
    with open_engine(its.engine, "onnxruntime") as opened, triton_server(place) as server:
        for each, path in its.adapters.items():
            opened.adapters.load(each, path)
        checks(server, Own(opened), its, home)
        print_speed(server, its)
