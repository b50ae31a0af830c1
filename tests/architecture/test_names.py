"""One class name, one class."""

import ast

from architecture.sources import ROOT, product_files


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in product_files():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path))
    assert places
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
