"""Encoder-decoders: rows with sources and adapters of their own equal transformers and PEFT."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import trt_lora
from support.models.encoder_decoders import (
    TARGETS,
    VOCABULARY,
    Built,
    build_encoder_decoder,
    expected_logprobs,
    found_logprobs,
    save_encoder_decoder,
    save_seq2seq_adapter,
    source_of,
)
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from trt_lora.plugins.errors import StateError
from trt_lora.runtime import Engine, SamplingParams, Scheduler, ServingConfig, open_engine

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),  # PEFT's
]
STEPS = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=VOCABULARY)
ROWS = {1: "all", 7: "cross_k", 40: "encoder", 300: None}  # the adapter of each size of a source
SOURCES = [source_of("T5", size) for size in ROWS]
FEW = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
A, B = source_of("T5", 9), source_of("T5", 9)[::-1]
PROMPT = [0, 17, 40]  # long enough to be shared among rows


@pytest.fixture
def engine(t5: Built) -> Iterator[Engine]:
    with open_engine(t5.folder / "engine", "onnxruntime") as engine:
        for name in TARGETS:
            engine.adapters.load(name, t5.folder / name)
        yield engine


def logprob(token: Any) -> float:
    """That of the token itself: two answers of equal tokens differ in it."""
    return float(token.logprobs[token.token_id].logprob)


def run(scheduler: Scheduler) -> dict[int, list[float]]:
    """The log probabilities of all that a scheduler answers, by request."""
    found: dict[int, list[float]] = {}
    while scheduler:
        answers = scheduler.step()
        assert answers.failed == {}
        for number, token in answers.tokens.items():
            found.setdefault(number, []).append(logprob(token))
    return found


def alone(engine: Engine, source: Sequence[int], adapter: str | None = None) -> list[float]:
    """What a prompt is answered by itself."""
    scheduler = engine.serve(ServingConfig(rows=1))
    number = scheduler.submit(PROMPT, FEW, adapter=adapter, source=source)
    return run(scheduler)[number]


def same(values: Sequence[float]) -> Any:
    return pytest.approx(values, abs=1e-5)


# --------------------------------------------------------------------------- as transformers


@pytest.mark.parametrize("mode", ["engine", "slots"])
def test_rows_of_other_sources_and_adapters_are_those_of_peft(t5: Built, mode: str) -> None:
    with open_engine(t5.folder / mode, "onnxruntime") as engine:
        for target in TARGETS:
            engine.adapters.load(target, t5.folder / target)
        names = list(ROWS.values())
        answers = engine.generate(sources=SOURCES, adapter=names, sampling=STEPS)
    for source, name, answer in zip(SOURCES, names, answers, strict=True):
        given = [0, *answer.token_ids]
        expected = expected_logprobs(t5.models[name], source, given)
        assert np.abs(found_logprobs(answer) - expected).max() < 1e-4
        if name is not None:  # what the adapter changes is more than what may differ
            base = expected_logprobs(t5.models[None], source, given)
            assert np.abs(base - expected).max() > 1e-3


@pytest.mark.parametrize("name", ["T5Gated", "Bart", "MBart", "Marian", "Whisper"])
def test_another_architecture_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = save_encoder_decoder(name, tmp_path / "model")
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    if name == "T5Gated":
        targets = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
    models = {
        None: model,
        "a": save_seq2seq_adapter(model, tmp_path / "a", targets, seed=1),
    }
    output = tmp_path / "engine"
    build_encoder_decoder(tmp_path / "model", output, target_modules=(*targets,))
    sources = [source_of(name, size) for size in (5, 11)]
    with open_engine(output, "onnxruntime") as engine:
        assert {"cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense"} <= {
            site.module.name for site in engine.manifest.sites if site.module
        }
        engine.adapters.load("a", tmp_path / "a")
        answers = engine.generate(sources=sources, adapter=[None, "a"], sampling=STEPS)
        shorter = SamplingParams(max_tokens=12, temperature=0)
        greedy = engine.generate(sources=sources, adapter=[None, "a"], sampling=shorter)
    start = model.config.decoder_start_token_id
    for source, adapted, answer, short in zip(
        sources, models.values(), answers, greedy, strict=True
    ):
        expected = expected_logprobs(adapted, source, [start, *answer.token_ids])
        assert np.abs(found_logprobs(answer) - expected).max() < 1e-4
        key = "input_features" if name == "Whisper" else "input_ids"
        given = {key: torch.tensor(np.array(source))[None]}
        wanted = generated(adapted, given)
        assert [start, *short.token_ids] == wanted[: len(short.token_ids) + 1]
        assert wanted[len(short.token_ids) + 1 :] in ([], [model.config.eos_token_id])


def generated(model: Any, given: dict[str, torch.Tensor]) -> list[int]:
    """Greedy tokens by transformers; Whisper's loop looks for time stamps, and is not called."""
    config = model.generation_config
    if "input_ids" in given:
        return list(map(int, model.generate(**given, max_new_tokens=12, do_sample=False)[0]))
    rules = LogitsProcessorList(
        [
            SuppressTokensLogitsProcessor(config.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin_index=1),
        ]
    )
    ids: Any = torch.tensor([[config.decoder_start_token_id]])
    while (ids.shape[1] < 13 and ids[0, -1] != config.eos_token_id) or ids.shape[1] == 1:
        logits = model(**given, decoder_input_ids=ids).logits[:, -1]
        ids = torch.cat([ids, rules(ids, logits).argmax(-1)[:, None]], dim=1)
    return list(map(int, ids[0]))


def test_what_is_said_of_an_engine_names_its_encoder(
    t5: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    said = trt_lora(capsys, "inspect", t5.folder / "engine")
    assert "sources of tokens, 1024 positions, weights of 0.3 MB" in said
    files = json.loads((t5.folder / "engine" / "manifest.json").read_text())["files"]
    assert {"engine.plan", "encoder.plan"} <= files.keys()  # TensorRT-RTX has built both


# --------------------------------------------------------------------------- rows


def test_rows_join_and_leave_with_their_sources(engine: Engine) -> None:
    rows = [*zip(SOURCES, ROWS.values(), (3, 8, 5, 8), strict=True)]
    expected = [alone(engine, source, name)[:count] for source, name, count in rows]
    scheduler, numbers = engine.serve(ServingConfig(rows=2)), []
    for source, name, count in rows:
        sampling = replace(FEW, max_tokens=count)
        numbers.append(scheduler.submit(PROMPT, sampling, adapter=name, source=source))
    found = run(scheduler)
    assert [found[number] for number in numbers] == [same(each) for each in expected]


def test_a_row_is_shared_among_equal_sources_alone(engine: Engine) -> None:
    a, b = alone(engine, A), alone(engine, B)
    assert a != same(b)
    scheduler = engine.serve(ServingConfig(rows=4))
    numbers = [scheduler.submit(PROMPT, FEW, source=source) for source in (A, B, A)]
    found = run(scheduler)
    assert [found[number] for number in numbers] == [same(a), same(b), same(a)]
    assert scheduler.shared_tokens == len(PROMPT) - 1
    later = scheduler.submit(PROMPT, FEW, source=B)  # beside what ended rows have kept
    assert run(scheduler)[later] == same(b)


def test_answers_to_one_source_are_as_many_as_are_asked_for(engine: Engine) -> None:
    sampling = replace(FEW, n=3, temperature=1.0, seed=1)
    several = engine.generate([PROMPT], sources=[A], sampling=sampling)
    first = engine.generate(PROMPT, sources=A, sampling=replace(sampling, n=1))
    assert len(several) == 3
    assert several[0].token_ids == first.token_ids


def test_a_text_is_a_source(engine: Engine, t5: Built, capsys: pytest.CaptureFixture[str]) -> None:
    ids = engine.tokenizer.encode_text("hello world")
    expected = engine.generate(sources=ids, sampling=FEW)
    answer = engine.generate(sources="hello world", sampling=FEW)
    assert answer.token_ids == expected.token_ids
    words = ("--max-tokens", "8", "--ignore-eos", "--json", "--backend", "onnxruntime")
    printed = trt_lora(capsys, "generate", t5.folder / "engine", "hello world", *words)
    assert tuple(json.loads(printed)["token_ids"]) == expected.token_ids


# --------------------------------------------------------------------------- stale cross caches


def test_another_version_of_an_adapter_does_not_meet_the_cross_cache_of_the_old_one(
    engine: Engine, t5: Built
) -> None:
    old, new = alone(engine, A, "all"), alone(engine, A, "encoder")
    assert old != same(new)
    scheduler = engine.serve(ServingConfig(rows=3))
    numbers = [scheduler.submit(PROMPT, FEW, adapter="all", source=A)]
    first = logprob(scheduler.step().tokens[numbers[0]])
    engine.adapters.load("all", t5.folder / "encoder", replace=True)
    numbers.append(scheduler.submit(PROMPT, FEW, adapter="all", source=A))
    found = run(scheduler)
    assert [first, *found[numbers[0]]] == same(old)  # to its end by what it began with
    assert found[numbers[1]] == same(new)


def test_a_row_that_was_lost_has_its_source_run_again(engine: Engine) -> None:
    expected = alone(engine, A, "all"), alone(engine, B, "encoder")
    scheduler = engine.serve(ServingConfig(rows=2, shares_prefixes=False))
    asked = (A, "all"), (B, "encoder")
    numbers = [scheduler.submit(PROMPT, FEW, adapter=n, source=source) for source, n in asked]
    firsts = scheduler.step().tokens
    scheduler.preempt(numbers[0])  # the other moves to its row, and it gets the other's
    found = run(scheduler)
    answers = [[logprob(firsts[number]), *found[number]] for number in numbers]
    assert answers == [same(each) for each in expected]


def test_a_lost_row_whose_adapter_was_replaced_is_refused(engine: Engine, t5: Built) -> None:
    scheduler = engine.serve(ServingConfig(rows=1))
    number = scheduler.submit(PROMPT, FEW, adapter="all", source=A)
    scheduler.step()
    scheduler.preempt(number)
    engine.adapters.load("all", t5.folder / "encoder", replace=True)
    failed = scheduler.step().failed
    assert isinstance(failed[number], StateError)
