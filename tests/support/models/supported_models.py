"""docs/supported-models.md, made from what the sweep over all architectures found."""

import importlib.metadata
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from support.doc_blocks import ROOT
from support.models.architecture_check import Verdict

RESULTS_FILE = ROOT / "docs" / "supported-models.json"
PAGE_FILE = ROOT / "docs" / "supported-models.md"
TOOLS = ("torch", "transformers", "peft")

Results = dict[str, dict[str, Any]]

_PAGE = """# Supported models

Made by `make architectures` with {versions}; do not edit.
Every causal language model of that transformers, small and random, in float32: its engine's logits
(two rows of different lengths, a prompt each, then token by token together) were compared with
transformers', and with PEFT's under a random adapter on all linears (DeepSeek: on the attention's).
The largest differences are below.

*Grouped* attention is ONNX Runtime's own
operator, which reads only what each row holds; the others read as far as the longest row.

{built} architectures build and match. {refused} are refused before the export, with the reason. Of
{not_made} transformers makes no small model without more than a config.

## Build and match

| architecture | model type | attention on a CPU | base model | adapter |
|---|---|---|---|---|
{built_rows}

Of a mixture of experts the adapter is on the attention; DeepSeek's models and Youtu have one dense
layer and one of experts.

## Encoder-decoders

Built with `--max-source-len`, in float32; log probabilities of 32 tokens behind sources of 5 and 40
tokens beside transformers and PEFT (an adapter on all linears of both sides), small and random.
Whisper reads features. Others, such as Pegasus, are refused by name.

| architecture | model type | base model | adapter |
|---|---|---|---|
| BartForConditionalGeneration | bart | 5.8e-06 | 9.1e-06 |
| MarianMTModel | marian | 3.2e-06 | 3.3e-06 |
| MBartForConditionalGeneration | mbart | 4.4e-06 | 4.3e-06 |
| T5ForConditionalGeneration | t5 | 6.3e-07 | 7.8e-07 |
| WhisperForConditionalGeneration | whisper | 6.0e-06 | 7.8e-06 |

## Components of pipelines

Folders of diffusers' and transformers' models, built with `--model PIPELINE/transformer` and the
like. Each was built small and random and run by ONNX Runtime in float32, at real time steps and two
sizes of picture and text, beside diffusers 0.42 or transformers and PEFT (an adapter on every
linear and 1x1 convolution): within 2e-6 of the largest value. TensorRT-RTX builds them in dtypes
of [a table](benchmarks/README.md#components-of-pipelines).

| family | class | inputs that vary in size | refused by name |
|---|---|---|---|
| SD1.5, SDXL | UNet2DConditionModel | picture, text | embeddings of classes, pictures, `text` |
| SD3 | SD3Transformer2DModel | picture, text | |
| Flux.1 | FluxTransformer2DModel | patches, text | |
| Flux.2 | Flux2Transformer2DModel | patches, text | |
| Qwen-Image | QwenImageTransformer2DModel | patches, text | Edit-2511 (`zero_cond_t`), Layered |
| Wan 2.1 from text | WanTransformer3DModel | frames, picture, text | from a picture (`image_dim`) |
| CLIP-L, CLIP-G | CLIPTextModel, CLIPTextModelWithProjection | rows | |
| T5, UMT5 | T5EncoderModel, UMT5EncoderModel | text | |
| ViT | ViTModel, ViTForImageClassification | rows | |

Qwen-Image's rotary tables are inputs: `img_rope` and `txt_rope` [s, d / 2, 2], which are
`torch.view_as_real` of what the model's `pos_embed` returns. Three linears of its last block reach
no output, and adapters' tensors for them have no effect. Z-Image is refused: it takes lists of
pictures and pads each in Python. Whisper is [an encoder-decoder](#encoder-decoders).

## Refused

| reason | architectures |
|---|---|
{refused_rows}

## Not tried

| model type | why |
|---|---|
{not_made_rows}
"""


def read_results() -> Results:
    """Return the committed verdicts by model type; empty before the first sweep."""
    if not RESULTS_FILE.is_file():
        return {}
    return dict(json.loads(RESULTS_FILE.read_text(encoding="utf-8"))["verdicts"])


def write_results(results: Results) -> None:
    """Write the verdicts, with the versions installed, and the page."""
    versions = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    content = {"versions": versions, "verdicts": dict(sorted(results.items()))}
    RESULTS_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE_FILE.write_text(page(content), encoding="utf-8")


def page(content: dict[str, Any]) -> str:
    """Return the page for what the results file holds."""
    verdicts = {name: Verdict(**fields) for name, fields in content["verdicts"].items()}
    built = {name: verdict for name, verdict in verdicts.items() if verdict.is_built}
    not_made = {name: verdict for name, verdict in verdicts.items() if verdict.not_made}
    return _PAGE.format(
        versions=", ".join(f"{tool} {version}" for tool, version in content["versions"].items()),
        built=len(built),
        refused=len(verdicts) - len(built) - len(not_made),
        not_made=len(not_made),
        built_rows="\n".join(_built_row(name, verdict) for name, verdict in built.items()),
        refused_rows="\n".join(_refused_rows(verdicts.values())),
        not_made_rows="\n".join(f"| {name} | {v.not_made} |" for name, v in not_made.items()),
    )


def _built_row(name: str, verdict: Verdict) -> str:
    errors = f"{verdict.base_error:.1e} | {verdict.adapter_error:.1e}"
    attention = "grouped" if verdict.grouped else "masked"
    return f"| {verdict.architecture} | {name} | {attention} | {errors} |"


def _refused_rows(verdicts: Iterable[Verdict]) -> Iterable[str]:
    by_reason = defaultdict[str, list[str]](list)
    for verdict in verdicts:
        if verdict.refusal:
            by_reason[reason_of(verdict)].append(verdict.architecture)
    for reason, names in sorted(by_reason.items()):
        yield f"| {reason} | {', '.join(sorted(set(names)))} |"


def reason_of(verdict: Verdict) -> str:
    """Return the words of a refusal that do not name the model or its classes."""
    _, _, reason = verdict.refusal.partition(": ")
    return reason.split(";")[0].split(" (")[0]
