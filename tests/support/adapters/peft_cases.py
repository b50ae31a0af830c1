"""Fields of PEFT configs that say which modules are targeted."""

from typing import Any

Fields = dict[str, Any]

Q = "model.layers.0.self_attn.q_proj"

# PEFT adapts some linears of a Llama, and leaves others alone.
CONFIGS: list[Fields] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "lm_head"]},
    {"target_modules": ["layers.1.self_attn.q_proj", Q]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.layers\.0\..*"},
    {"target_modules": ["q_proj"], "exclude_modules": ["proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.1\.mlp\.(up|down)_proj"},
    {"target_modules": ".*q_proj|lm_head"},
    {"target_modules": r".*proj", "exclude_modules": ["mlp.up_proj"]},
    {"target_modules": r".*proj", "exclude_modules": r".*\.self_attn\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0, 11]},
    {"target_modules": [Q, "v_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1, 0],
        "layers_pattern": ["h", "layers"],
    },
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "l.*s"},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
]

# PEFT finds nothing to adapt in a Llama.
NOWHERE: list[Fields] = [
    {"target_modules": ["model.layers.1"]},
    {"target_modules": "q_proj"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers|h"},
]

# Only the model tells, or the pattern is too complex to be evaluated.
UNTOLD: list[Fields] = [
    {},
    {"target_modules": None},
    {"target_modules": 3},
    {"target_modules": ["q_proj", 3]},
    {"target_modules": "((a|b)*c)+"},
    {"target_modules": "a)(b"},
    {"target_modules": ["q_proj"], "exclude_modules": "((a|b)*c)+"},
    {"target_modules": ["q_proj"], "layers_to_transform": ["1"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "((a|b)*c)+"},
]
