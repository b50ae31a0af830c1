"""Serve an engine and its adapters, and say what each of them answers without HTTP."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clients.served import MESSAGES, MOST_TOKENS, PROMPT, Answer, Served
from support.eventually import eventually
from support.served_process import started

from trt_lora.runtime import Engine, SamplingParams, open_engine

BASE = "base"


@contextmanager
def serving(engine: Path, model: Path, adapters: Mapping[str, Path]) -> Iterator[Served]:
    """Serve until the end of the block, in processes; the server must not have failed.

    Args:
        engine: the directory of an engine.
        model: the checkpoint that it was built from.
        adapters: all directories of one folder, which servers share, by name.
    """
    answers = _answers(engine, adapters)
    (folder,) = {path.parent for path in adapters.values()}
    words = [engine, "--served-model-name", BASE, "--lora-dir", folder]
    words += ["--allow-runtime-lora-updating", "--drain-grace", "0"]
    with started(*words) as server:
        assert eventually(lambda: server.is_ready() or server.process.poll() is not None)
        if server.process.poll() is not None:
            raise AssertionError(server.log)
        address = str(server.client.base_url).rstrip("/")
        paths = {name: str(path) for name, path in adapters.items()}
        yield Served(address, answers, str(engine), str(model), paths)
        assert server.is_ready()
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log, server.log


def _answers(engine: Path, adapters: Mapping[str, Path]) -> dict[str, Answer]:
    with open_engine(engine, "onnxruntime") as opened:
        for name, path in adapters.items():
            opened.adapters.load(name, path)
        return {name or BASE: _answer(opened, name) for name in (None, *adapters)}


def _answer(engine: Engine, adapter: str | None) -> Answer:
    """Text of a completion is not a message: the tokenizer reads it without the template."""
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    ids = engine.tokenizer.encode_text(PROMPT, special_tokens=True)
    completion, chat = engine.generate([ids, MESSAGES], adapter=adapter, sampling=sampling)
    return Answer(completion.text, chat.text, len(completion.token_ids), len(chat.token_ids))
