"""A folder that looks like a checkout with the README's engines, around a small random model."""

import contextlib
import io
import json
import shlex
import shutil
from pathlib import Path

from support.doc_blocks import ROOT, Block, run_block
from support.models.quick_build import quick_build, shared_traces
from support.models.tiny_models import VOCABULARY, save_adapter, tiny_config

from trt_lora.scripts import build_engine, trt_lora_command

MODULES = ("attn_q", "attn_v")
ADAPTERS = {"json": 2, "letter": 3, "pirate": 4}  # ranks
COMMANDS = {"trt-lora": trt_lora_command.main, "build-engine": build_engine.main}


def make_checkout(folder: Path, model: Path, engine: Path) -> Path:
    """Make the folder: the model and an engine for one adapter are there already."""
    copies = {"build/smollm2": model, "engines/smollm2": engine}
    for name, source in copies.items():
        shutil.copytree(source, folder / name)
        _write_tokenizer(folder / name)
    for name in ("examples", "tests/builder"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    for name, rank in ADAPTERS.items():
        path = folder / "tests" / "adapters" / name
        save_adapter(model, path, seed=rank, r=rank, target_modules=["q_proj", "v_proj"])
    other = ["layers.0.self_attn.o_proj"]  # which has no site
    save_adapter(model, folder / "tests" / "adapters" / "other", target_modules=other)
    options = {"target_modules": MODULES, "max_loras": 3, "max_batch_size": 4}
    quick_build(tiny_config(folder / "build/smollm2", folder / "engines/many", **options))
    return folder


def run_in(folder: Path, block: Block) -> str:
    """Run a block in a folder and return what it prints; commands of ours in this process."""
    commands = list[list[str]]()
    if block.language == "bash":
        lines = block.text.replace("\\\n", " ").splitlines()
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        if any(words[0] not in COMMANDS for words in commands):
            return run_block(block, folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        if block.language == "python":
            exec(compile(block.text, "<page>", "exec"), {"__name__": "page"})
        else:
            with shared_traces():
                for name, *arguments in commands:
                    COMMANDS[name](arguments)
    return printed.getvalue()


def _write_tokenizer(directory: Path) -> None:
    """Words w0 to w96, split at spaces; every other word is the last. A chat is its messages."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    fields = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": f"w{VOCABULARY - 1}"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
