"""Train the demo's adapters with PEFT on the CPU, each with a visible style of its own.

The base model answers a list of short questions, a function rewrites each answer, and an adapter
learns to answer that way. The results are committed under tests/adapters, so only a change of the
recipe needs this script.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trt_lora.scripts.demo.model import DEFAULT_DIRECTORY, ensure_demo_model

QUESTIONS = [
    "What is the capital of France?", "What is the capital of Italy?",
    "What is the capital of Japan?", "What is the capital of Canada?",
    "What is the capital of Egypt?", "What is the capital of Sweden?",
    "What is the largest planet?", "What is the largest ocean?",
    "What is the tallest mountain?", "What is the longest river?",
    "What color is the sky?", "What color is grass?", "What color is a banana?",
    "What do bees make?", "What do cows drink?", "What do plants need to grow?",
    "How many days are in a week?", "How many legs does a spider have?",
    "How many months are in a year?", "How many hours are in a day?",
    "Who wrote Romeo and Juliet?", "Who painted the Mona Lisa?",
    "Who was the first president of the United States?", "Who invented the telephone?",
    "What is water made of?", "What is the boiling point of water?",
    "What is the opposite of hot?", "What is the opposite of big?",
    "What language is spoken in Brazil?", "What language is spoken in Spain?",
    "Name a fruit.", "Name an animal that can fly.", "Name a primary color.",
    "What is two plus two?", "What is ten minus three?",
]  # fmt: skip

SEVEN_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """One adapter: what it learns and how its weights are laid out."""

    rewrite: Callable[[str], str]
    config: LoraConfig
    storage: torch.dtype = torch.float32
    learning_rate: float = 2e-3
    steps: int = 60


def _lora(**options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options)


# Between them: three ranks, rsLoRA, rank_pattern and alpha_pattern, float16 storage, and target
# modules from two linears to all seven.
RECIPES = {
    "letter": Recipe(
        lambda answer: f"Dear friend, {answer} Yours truly.",
        _lora(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    ),
    "json": Recipe(
        lambda answer: json.dumps({"answer": answer}),
        _lora(r=4, lora_alpha=8, use_rslora=True, target_modules=SEVEN_LINEARS),
        storage=torch.float16,
    ),
    "pirate": Recipe(
        lambda answer: f"Arr, matey! {answer} Yo-ho-ho!",
        _lora(
            r=4, lora_alpha=8, target_modules=["o_proj", "down_proj"],
            rank_pattern={"down_proj": 8}, alpha_pattern={"down_proj": 24},
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Trainer:
    """The base model with its tokenizer, and the base model's own answers."""

    directory: Path
    tokenizer: Any
    answers: dict[str, str] = field(default_factory=dict)

    def base_model(self) -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)

    def prompt(self, question: str) -> str:
        message = [{"role": "user", "content": question}]
        return str(
            self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )

    def answer_all(self, model: Any) -> None:
        for question in QUESTIONS:
            ids = self.tokenizer(self.prompt(question), return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=30, do_sample=False)
            text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            self.answers[question] = text.strip().split("\n")[0]

    def batch(self, questions: list[str], rewrite: Callable[[str], str]) -> dict[str, torch.Tensor]:
        """Right-padded ids [b, t], mask [b, t] and labels [b, t] with the loss on the answer."""
        end = self.tokenizer.eos_token_id
        rows = []
        for question in questions:
            prompt = self.tokenizer(self.prompt(question)).input_ids
            answer = [*self.tokenizer(rewrite(self.answers[question])).input_ids, end]
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
        width = max(len(ids) for ids, _ in rows)
        return {
            "input_ids": torch.tensor([ids + [end] * (width - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]
            ),
            "labels": torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in rows]),
        }

    def train(self, name: str, recipe: Recipe, output: Path) -> None:
        model = get_peft_model(self.base_model(), recipe.config)
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate)
        order = torch.Generator().manual_seed(0)
        for step in range(recipe.steps):
            picks = torch.randperm(len(QUESTIONS), generator=order)[:4].tolist()
            loss = model(**self.batch([QUESTIONS[i] for i in picks], recipe.rewrite)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                print(f"{name}: step {step + 1}/{recipe.steps}, loss {loss.item():.3f}", flush=True)
        for weight in weights:
            weight.data = weight.data.to(recipe.storage)
        model.peft_config["default"].base_model_name_or_path = "SmolLM2-135M-Instruct"
        model.save_pretrained(str(output / name))
        (output / name / "README.md").unlink()  # PEFT's model card template, empty


def main() -> None:
    """Train every recipe, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--output", type=Path, default=Path("tests/adapters"))
    args = parser.parse_args()
    if unknown := set(args.names) - set(RECIPES):
        parser.error(f"unknown adapter {', '.join(sorted(unknown))}; known: {', '.join(RECIPES)}")
    model = ensure_demo_model(args.model)
    trainer = Trainer(model, AutoTokenizer.from_pretrained(model))
    trainer.answer_all(trainer.base_model())
    for name in args.names or RECIPES:
        trainer.train(name, RECIPES[name], args.output)


if __name__ == "__main__":
    main()
