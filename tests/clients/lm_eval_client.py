"""lm-eval: `local-completions` against `hf` with `peft=`, on a task of its own, to 1e-3."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

from clients.served import Served, command, told

TASKS = ("trt_lora_choices", "trt_lora_perplexity")
CLOSE = 1e-3


def metrics(kind: str, arguments: str, *words: str) -> dict[str, float]:
    """Run the tasks on a model of lm-eval; return the metrics by task and name."""
    folder = Path(f"out-{len([*Path().iterdir()])}")
    run = [command("lm_eval"), "run", "--model", kind, "--model_args", arguments]
    run += ["--include_path", ".", "--tasks", ",".join(TASKS), "--output_path", str(folder), *words]
    subprocess.run(run, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    (found,) = folder.rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    return {
        f"{task} {name.removesuffix(',none')}": value
        for task in TASKS
        for name, value in results[task].items()
        if name.endswith(",none") and "stderr" not in name
    }


def of_server(served: Served, name: str) -> dict[str, float]:
    """Through HTTP: token ids, `echo` and log probabilities."""
    arguments = f"model={name},base_url={served.url}/completions,tokenizer={served.model}"
    more = "tokenized_requests=True,num_concurrent=2,max_retries=1,max_length=1024"
    return metrics("local-completions", f"{arguments},{more}", "--batch_size", "4")


def of_peft(served: Served, name: str) -> dict[str, float]:
    """By transformers and PEFT, from the checkpoint that the engine was built from."""
    arguments = f"pretrained={served.model},peft={served.adapters[name]},dtype=float32"
    more = "max_length=1024"
    return metrics("hf", f"{arguments},{more}", "--device", "cpu", "--batch_size", "4")


if __name__ == "__main__":
    its = told()
    for file in Path(__file__).with_name("lm_eval_task").iterdir():
        shutil.copy(file, ".")
    found = {name: (of_server(its, name), of_peft(its, name)) for name in its.adapters}
    for name, (ours, theirs) in found.items():
        for metric, value in theirs.items():
            print(f"{name:8} {metric:36} {ours[metric]:.6f} {value:.6f}")
    for ours, theirs in found.values():
        assert ours.keys() == theirs.keys()
        assert len(ours) == 6
        assert all(math.isclose(ours[m], theirs[m], rel_tol=CLOSE) for m in ours)
    assert len({json.dumps(theirs) for _, theirs in found.values()}) == len(found)
