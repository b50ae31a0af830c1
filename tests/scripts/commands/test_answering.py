"""`trt-lora generate` and `trt-lora chat`: what they print is what `generate` answers."""

import io
import json
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.commands import trt_lora
from support.models.tiny_models import save_adapter
from support.spoken_engine import spoken_engine

from trt_lora.runtime import LoRAManager, SamplingParams, TextTokenizer, generate, open_engine

TOKENS = 6
OPTIONS = ["--max-new-tokens", str(TOKENS), "--backend", "onnxruntime"]


@pytest.fixture(scope="module")
def engine(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine with words for its tokens, and a chat template."""
    return spoken_engine(tiny_engine.engine, tmp_path_factory.mktemp("spoken") / "engine")


@pytest.fixture(scope="module")
def adapter(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(
        tiny_engine.model,
        tmp_path_factory.mktemp("spoken") / "a",
        r=8,
        target_modules=["q_proj", "v_proj"],
    )


def answer(engine: Path, prompt: object, adapters: dict[str, Path], use: str = "") -> str:
    """What the Python interface answers."""
    sampling = SamplingParams(max_new_tokens=TOKENS)
    with open_engine(engine, "onnxruntime") as opened:
        manager = LoRAManager()
        manager.initialize_engine_bindings(opened)
        for name, path in adapters.items():
            manager.load_weights(name, path)
        if use:
            manager.switch_weights(use)
        found = generate(opened, [prompt], manager=manager, sampling=sampling)  # type: ignore[list-item]
    return found[0].text


def test_one_prompt_is_streamed_as_generate_answers_it(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use = ["--adapter", f"a={adapter}", "--use", "a"]
    base = trt_lora(capsys, "generate", engine, "w5 w6 w7", *OPTIONS)
    adapted = trt_lora(capsys, "generate", engine, "w5 w6 w7", *OPTIONS, *use)
    assert base == answer(engine, "w5 w6 w7", {}) + "\n"
    assert adapted == answer(engine, "w5 w6 w7", {"a": adapter}, "a") + "\n"
    assert adapted != base


def test_several_prompts_are_one_batch_and_json_is_one_object_a_line(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "generate", engine, "w5 w6", "w9", *OPTIONS, "--json")
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["prompt"] for row in rows] == ["w5 w6", "w9"]
    assert [row["text"] for row in rows] == [answer(engine, p, {}) for p in ("w5 w6", "w9")]
    assert all(len(row["token_ids"]) <= TOKENS for row in rows)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_an_adapter_that_was_not_given_is_refused(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "generate", engine, "w5", *OPTIONS, "--use", "b", expected=2)
    assert printed == "error: unknown adapter 'b'; loaded: none\n"


def talk(
    engine: Path, lines: list[str], capsys: pytest.CaptureFixture[str], *options: str
) -> list[str]:
    """What a conversation prints, without the prompts of its lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("\n".join([*lines, ""])))
        printed = trt_lora(capsys, "chat", engine, *OPTIONS, *options)
    return printed.splitlines()


def test_a_conversation_remembers_switches_and_forgets(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["w5 w6", "/load a=" + str(adapter), "/use a", "w7", "/new", "w5 w6"]
    first, second, third, _ = talk(engine, lines, capsys)
    said = answer(engine, "w5 w6", {})
    assert first == f"(base)> {said}"
    turns = [("user", "w5 w6"), ("assistant", said), ("user", "w7")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert second == f"(base)> (base)> a> {answer(engine, messages, {'a': adapter}, 'a')}"
    assert third == f"a> a> {answer(engine, 'w5 w6', {'a': adapter}, 'a')}"


def test_adapters_are_listed_and_blended_and_a_mistake_ends_nothing(
    engine: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--adapter", f"a={adapter}", "--use", "a"]
    lines = ["/use b", "/blend a", "/wave", "/blend a=0.5", "/adapters", "/use", "/quit", "w5"]
    printed = "\n".join(talk(engine, lines, capsys, *options))
    assert "error: unknown adapter 'b'; loaded: a" in printed
    assert "error: /blend got 'a', expected NAME=WEIGHT: a=0.7" in printed
    assert "error: there is no /wave; commands:\n/use NAME" in printed
    assert printed.endswith("blend>   (base)\n  a\n* blend\nblend> (base)> ")


def test_half_a_character_is_held_back() -> None:
    from trt_lora.runtime.generation.text.tokenizer import TextStream

    pieces = iter(["a", None, "é", None])
    stream = TextStream(lambda _: next(pieces), lambda ids: "aé\ufffd" if len(ids) == 4 else "")
    assert [stream.add(n) for n in range(4)] == ["a", "", "é", ""]
    assert stream.end() == "\ufffd"


def test_a_streamed_text_is_the_decoded_text(engine: Path) -> None:
    tokenizer = TextTokenizer(engine)
    ids = [5, 6, 0, 2, 90]
    stream = tokenizer.stream()
    assert "".join([*map(stream.add, ids), stream.end()]) == tokenizer.decode(ids)
