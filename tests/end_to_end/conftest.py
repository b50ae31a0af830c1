"""The engines that adapters by PEFT are tried on."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.adapters.peft_fields import Running, bound_manager, logits
from support.models.encoder_decoders import Built, build_t5
from support.models.quick_build import quick_build
from support.models.tiny_models import save_model, tiny_config

from trt_lora.runtime import open_engine


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Both engines, by architecture; seconds each."""
    folder = tmp_path_factory.mktemp("fields")
    with ExitStack() as stack:
        found = {}
        for name in ("Llama", "GPT2"):
            model = save_model(name, folder / name / "model")
            output, targets = folder / name / "engine", ("all-linear", "lm_head")
            quick_build(tiny_config(model, output, target_modules=targets))
            engine = stack.enter_context(open_engine(output))
            found[name] = Running(model, engine, logits(engine, bound_manager(engine)))
        yield found


@pytest.fixture
def llama(running: dict[str, Running]) -> Running:
    """The Llama, whose lm_head has a weight of its own."""
    return running["Llama"]


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A T5 with its adapters and engines, in 20 seconds."""
    return build_t5(tmp_path_factory.mktemp("t5"))
