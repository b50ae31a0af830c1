"""One class name, one class; peers' names are theirs, in the folder of each."""

import ast

from architecture.sources import ROOT, product_files

INTERFACES = ("runtime", "interfaces")


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places: dict[tuple[str, ...], list[str]] = {}
    for path in product_files():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                peer = path.parts[2:3] if path.parts[:2] == INTERFACES else ()
                places.setdefault((*peer, node.name), []).append(str(path))
    assert places
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Without lengths, kept and bound, which are words of tables too.
CACHE_NAMES, TOKEN_NAMES = {"cache.", "new_cache."}, {"input_ids"}
OTHERS = {  # they call a model of transformers, or are called by clients of Triton, by these names
    "builder/export/component_calls.py",
    "runtime/scaleout/triton/asked.py",
    "scripts/demo/train_adapters.py",
    "scripts/verification/peft_reference.py",
}


def test_one_file_names_the_inputs_of_an_engine() -> None:
    found = {}
    for path in product_files():
        strings = {
            node.value
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if names := strings & (CACHE_NAMES | TOKEN_NAMES):
            found[path.as_posix()] = names
    assert found.pop("plugins/contract/step.py") == CACHE_NAMES
    assert found.pop("runtime/generation/decoding/step_inputs.py") == TOKEN_NAMES
    assert set(found) <= OTHERS
