"""DoRA over HTTP: an engine with vectors serves it, one without refuses it in vLLM's words."""

from pathlib import Path

import pytest
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config
from support.spoken_engine import give_words
from support.web_server import COMPLETIONS, web_server

from trt_lora.runtime import open_engine
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.server.running_server import ServerConfig

pytestmark = pytest.mark.slow

LOAD = "/v1/load_lora_adapter"


@pytest.mark.parametrize("vectors", [True, False])
def test_dora_is_served_by_an_engine_with_vectors_alone(vectors: bool, tmp_path: Path) -> None:
    model, root = save_model("Qwen2", tmp_path / "model"), tmp_path / "adapters"
    quick_build(tiny_config(model, tmp_path / "engine", lora_vectors=vectors))
    engine = give_words(tmp_path / "engine")
    dora = save_adapter(model, root / "dora", use_dora=True, bias="lora_only")
    config = ServerConfig(engine, in_process=True, names=["base"], lora_roots=[root])
    with web_server(config) as web:
        response = web.post(LOAD, lora_name="dora", lora_path=str(dora))
        if not vectors:
            assert response.status_code == 500
            assert "this server does not yet support DoRA" in response.text
            assert "Adapter bias is not supported" in response.text
            assert "--lora-vectors" in response.text
            return
        assert response.status_code == 200, response.text
        asked = {"prompt": "w5 w6 w7", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        texts = [
            web.answer(COMPLETIONS, model=m, **asked)["choices"][0]["text"]
            for m in ("base", "dora")
        ]
    with open_engine(engine) as opened:
        opened.adapters.load("dora", dora)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        ours = [
            opened.generate("w5 w6 w7", sampling=params, adapter=name).text
            for name in (None, "dora")
        ]
    assert texts == ours
    assert texts[0] != texts[1]
