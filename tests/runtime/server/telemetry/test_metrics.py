"""What Prometheus and routers are told."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.eventually import eventually
from support.fakes.slot_engine import POISON, number_file
from support.served_engines import MakeGated, Spoken, waiting
from support.web_server import COMPLETIONS, Web, web_server

from trt_lora.runtime.generation.decoding.rows import RowCounts
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.server.engine_process import engine_side
from trt_lora.runtime.server.engine_process.step_meter import StepMeter

PROMPT = [1, 2, 3]


def series(web: Web, name: str) -> dict[str, float]:
    """The series of a metric, by their labels."""
    text = web.client.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def ends(web: Web) -> dict[str, float]:
    """How many answers have ended, by reason."""
    found = series(web, "vllm:request_success_total")
    return {labels.split('"')[3]: count for labels, count in found.items()}


def lora_labels(web: Web) -> dict[str, str]:
    """The labels of the one series about adapters."""
    (labels,) = series(web, "vllm:lora_requests_info")
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


def test_answers_are_counted_by_tokens_reason_and_time(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        web.events(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        base = 'engine="0",model_name="base"'
        assert series(web, "vllm:prompt_tokens_total") == {base: 6}
        assert series(web, "vllm:generation_tokens_total") == {base: 8}
        assert ends(web) == {"length": 2, "stop": 0, "abort": 0, "error": 0}
        for name, count in (
            ("time_to_first_token", 2),
            ("e2e_request_latency", 2),
            ("inter_token_latency", 6),
        ):
            assert series(web, f"vllm:{name}_seconds_count") == {base: count}, name
        assert series(web, "vllm:num_requests_running") == {base: 0}


def test_running_adapters_are_those_a_step_can_use_and_waiting_ones_are_wanted(
    make_gated: MakeGated,
) -> None:
    gated = make_gated(rows=2)
    assert lora_labels(gated.web) | {"max_lora": ""} == {
        "max_lora": "",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    for name in "12":
        gated.web.answer(COMPLETIONS, prompt=PROMPT, model=name, max_tokens=1)
    assert lora_labels(gated.web) == {  # idle, and there
        "max_lora": "2",
        "running_lora_adapters": "1,2",
        "waiting_lora_adapters": "",
    }
    gated.engine.shut()
    with waiting(gated), waiting(gated, model="3"):
        assert lora_labels(gated.web)["waiting_lora_adapters"] == "3"
        gated.engine.let()


def test_the_number_of_series_does_not_grow_with_adapters(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        lines = {len(web.client.get("/metrics").text.splitlines())}
        for number in range(20):
            path = str(spoken.adapters["a"])
            web.post("/v1/load_lora_adapter", lora_name=f"x{number}", lora_path=path)
            web.answer(COMPLETIONS, prompt=PROMPT, model=f"x{number}", max_tokens=1)
            lora = [{"name": f"x{number}", "scale": 0.5}, {"name": "x0", "scale": number + 2}]
            web.answer(COMPLETIONS, prompt=PROMPT, lora=lora[: 1 + (number > 0)], max_tokens=1)
            lines.add(len(web.client.get("/metrics").text.splitlines()))
        assert len(lines) == 1
        levels = series(web, "trt_lora:adapters")
        assert sum(levels.values()) == 20
        # Slots hold what was blended last; that is no adapter that anybody has loaded.
        assert levels['engine="0",level="slot",model_name="base"'] < 2


@pytest.mark.parametrize("kind", ["json", "TEXT"])
def test_an_answer_has_the_load_in_a_header_where_that_is_asked_for(web: Web, kind: str) -> None:
    headers = {"endpoint-load-metrics-format": kind}
    body = {"prompt": PROMPT, "max_tokens": 1}
    report = web.client.post(COMPLETIONS, json=body, headers=headers).headers[
        "endpoint-load-metrics"
    ]
    if kind == "TEXT":
        assert re.fullmatch(
            r"TEXT named_metrics.kv_cache_usage_perc=[\d.]+, "
            r"named_metrics.num_requests_waiting=0.0",
            report,
        )
    else:
        assert json.loads(report.removeprefix("JSON "))["named_metrics"].keys() == {
            "kv_cache_usage_perc",
            "num_requests_waiting",
        }
    assert "endpoint-load-metrics" not in web.client.post(COMPLETIONS, json=body).headers


def test_the_rows_in_use_are_told_while_they_are(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2)
    gated.engine.shut()
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 20, "ignore_eos": True}
    with gated.web.client.stream("POST", COMPLETIONS, json=body):
        gated.engine.let(4)
        name = "vllm:num_requests_running"
        assert eventually(lambda: list(series(gated.web, name).values()) == [1])
        assert list(series(gated.web, "vllm:kv_cache_usage_perc").values()) == [0.5]
        gated.engine.let()
    assert eventually(lambda: list(series(gated.web, name).values()) == [0])


def test_each_answer_counts_as_one_whatever_body_asked_for_it(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        body = {"temperature": 1, "ignore_eos": True}
        web.answer(COMPLETIONS, prompt=[PROMPT, [4, 5]], n=3, max_tokens=2, **body)
        web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=3, **body)
        base = 'engine="0",model_name="base"'
        assert ends(web)["length"] == 7
        assert series(web, "vllm:prompt_tokens_total") == {base: 3 * 5 + 3}
        sums = {
            "request_prompt_tokens": 3 * 5 + 3,
            "request_generation_tokens": 6 * 2 + 3,
            "request_params_max_tokens": 6 * 2 + 3,
            "request_params_n": 3 + 3 + 1,
        }
        for name, total in sums.items():
            assert series(web, f"vllm:{name}_sum") == {base: total}, name
        assert series(web, "vllm:request_params_n_count") == {base: 3}
        for name in ("queue", "prefill", "decode", "inference"):
            assert series(web, f"vllm:request_{name}_time_seconds_count") == {base: 7}
        assert series(web, "vllm:request_time_per_output_token_seconds_count") == {base: 7}
        assert series(web, "vllm:prefix_cache_queries_total") == {base: 3 * 5 + 3}
        (hits,) = series(web, "vllm:prefix_cache_hits_total").values()
        assert hits >= 2 * 2 + 2 * 1  # of each prompt all but the last token, for two of three
        assert series(web, "vllm:num_preemptions_total") == {base: 0}


def test_the_parts_of_a_request_make_up_the_whole(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        for _ in range(3):
            web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
        (sums,) = zip(
            *(
                series(web, f"vllm:{name}_seconds_sum").values()
                for name in (
                    *("request_queue_time", "request_prefill_time", "request_decode_time"),
                    *("request_inference_time", "e2e_request_latency", "inter_token_latency"),
                )
            ),
            strict=True,
        )
        queue, prefill, decode, inference, whole, between = sums
        assert inference == pytest.approx(prefill + decode)
        assert between == pytest.approx(decode)  # of one row at a time
        assert 0 < queue + inference < whole


def test_an_answer_that_nobody_waits_for_is_aborted_and_one_that_fails_an_error(
    make_gated: MakeGated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StepMeter] = []

    def meter(counts: RowCounts) -> StepMeter:
        made.append(StepMeter(counts))
        return made[0]

    monkeypatch.setattr(engine_side, "StepMeter", meter)
    gated = make_gated(rows=2)
    path = str(number_file(tmp_path, POISON))
    assert gated.web.post("/v1/load_lora_adapter", lora_name="bad", lora_path=path).is_success
    gated.web.refusal(COMPLETIONS, 500, prompt=PROMPT, model="bad")
    assert ends(gated.web) == {"length": 0, "stop": 0, "abort": 0, "error": 1}
    gated.engine.shut()
    with waiting(gated, max_tokens=20, ignore_eos=True, n=2, temperature=1):
        assert len(made[0]) == 2
    gated.engine.let()
    assert eventually(lambda: not len(made[0]), 20)  # nothing is kept of them
    assert eventually(lambda: ends(gated.web)["abort"] == 2)
    assert series(gated.web, "vllm:e2e_request_latency_seconds_count").popitem()[1] == 0


def test_adapters_that_come_are_counted_by_where_and_by_how_long_they_were_waited_for(
    make_gated: MakeGated,
) -> None:
    gated = make_gated(rows=2)
    level = 'engine="0",level="{}",model_name="base"'.format
    loads = "trt_lora:adapter_loads_total"
    assert series(gated.web, loads) == {level("memory"): 3, level("slot"): 0}
    for name in "1123":  # the second is there; the last takes a slot from another one
        gated.web.answer(COMPLETIONS, prompt=PROMPT, model=name, max_tokens=1)
    gated.web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=1)
    assert series(gated.web, loads) == {level("memory"): 3, level("slot"): 3}
    base = 'engine="0",model_name="base"'
    assert series(gated.web, "trt_lora:adapter_wait_seconds_count") == {base: 4}
    (seconds,) = series(gated.web, "trt_lora:adapter_wait_seconds_sum").values()
    (queue,) = series(gated.web, "vllm:request_queue_time_seconds_sum").values()
    assert 0 < seconds <= queue


def test_steps_are_told_by_kind_with_the_gaps_of_rows(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=5, temperature=0, ignore_eos=True)
        kinds = {"decode": 4, "prefill": 1, "mixed": 0}
        wanted = {f'engine="0",kind="{k}",model_name="base"': n for k, n in kinds.items()}
        name = "trt_lora:step_seconds_count"
        assert eventually(lambda: series(web, name) == wanted)
        base = 'engine="0",model_name="base"'
        assert series(web, "trt_lora:step_gap_seconds_count") == {base: 4}
        assert series(web, "vllm:iteration_tokens_total_sum") == {base: 3 + 5}
        for name in ("trt_lora:step_gap", "vllm:inter_token_latency"):
            found = series(web, f"{name}_seconds_bucket")
            assert found['engine="0",le="+Inf",model_name="base"'] == 4


# vLLM's names that say what is so here too; those of caches of images, of speculation, of
# transfers between servers and of sleep have nothing behind them.
VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info "
    "lora_requests_info",
    "counter": "prompt_tokens generation_tokens prefix_cache_queries prefix_cache_hits "
    "num_preemptions request_success admission_rejections",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "iteration_tokens_total request_params_n request_params_max_tokens",
}


def test_the_names_and_kinds_are_vllms(web: Web) -> None:
    families = list(text_string_to_metric_families(web.client.get("/metrics").text))
    found = {(f.type, f.name.removeprefix("vllm:")) for f in families if f.name[:5] == "vllm:"}
    assert {pair for pair in found if not pair[1].endswith("_created")} == {
        (kind, name) for kind, names in VLLM.items() for name in names.split()
    }


def test_the_cache_is_told_in_blocks_that_routers_multiply(spoken: Spoken) -> None:
    with web_server(spoken.config(max_model_len=32)) as web:
        (labels,) = series(web, "vllm:cache_config_info")
        told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        manifest = read_manifest(spoken.engine)
        room = int(told["block_size"]) * int(told["num_gpu_blocks"])
        assert room == manifest.max_batch_size * manifest.max_seq_len
