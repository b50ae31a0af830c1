"""Trained rows as LoRA of the embedding and of the output head: exact, at their number or width.

E[ids] + A[ids] B with a row of A for each token that is one-hot, and B = trained - own. A head that
has the embedding's weight changes with it, as in PEFT.

A module that was saved whole changes by itself, as in PEFT: A of an embedding, or B of a head, is
trained - own, and the other factor the identity.
"""

from dataclasses import replace

from trt_lora.plugins.contract.modules import EMBEDDING, HEAD, is_embedding
from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.dora import Base
from trt_lora.runtime.adapters.formats.peft_config import merge_advice
from trt_lora.runtime.adapters.token_rows import TokenRows
from trt_lora.runtime.manifest import Manifest


def with_token_pairs(adapter: Adapter, manifest: Manifest, base: Base) -> Adapter:
    """Return the adapter with A and B in the place of trained rows; they are read when cast.

    Args:
        adapter: any; one without trained tokens is returned as it is.
        manifest: of the engine.
        base: its weights, by the paths of their modules.

    Raises:
        AdapterError: the embedding or the head is no site, or takes LoRA of the adapter too, its
            weight is none of floats, or a token is beyond its rows.
    """
    tokens, sites = dict(adapter.tokens), {site.path: site for site in manifest.sites}
    head = manifest.base_model.tied_head
    tables = [rows for path, rows in tokens.items() if is_embedding(path) and rows.ids]
    if head and tables:
        tokens.setdefault(head, tables[0])
    weights = dict(adapter.weights)
    for path, rows in tokens.items():
        names = BindingNames.LORA.pair(path)
        if path not in (sites if rows.ids else manifest.saved_modules):
            raise AdapterError(f"{rows.asked_by}; or build an engine for it with {_option(tokens)}")
        if weights.keys() & {*names}:
            raise AdapterError(f"{rows.asked_by}: {path} has LoRA too, and both are not one sum")
        _check(rows, sites[path], manifest, adapter.source)
        make = rows.of_embedding if is_embedding(path) else rows.of_head
        size = sites[path].k if is_embedding(path) else sites[path].n
        weights |= zip(names, make(base(path), size), strict=True)
    return replace(adapter, weights=weights, tokens={})


def _option(tokens: dict[str, TokenRows]) -> str:
    options = {"--lora-target-modules ...": True, "--lora-saved-modules": False}
    names = {
        option: sorted({_name(path) for path, rows in tokens.items() if bool(rows.ids) == has_ids})
        for option, has_ids in options.items()
    }
    return " ".join(f"{option} {' '.join(found)}" for option, found in names.items() if found)


def _name(path: str) -> str:
    return EMBEDDING if is_embedding(path) else HEAD


def _check(rows: TokenRows, site: Site, manifest: Manifest, source: str) -> None:
    size, name = site.k if is_embedding(site.path) else site.n, manifest.base_model.name
    if not rows.ids and rows.rows.shape != (size, site.width):
        raise AdapterError(
            f"{source}: {', '.join(rows.rows.names)} has shape {[*rows.rows.shape]}, and "
            f"{site.path} of {name} is [{size}, {site.width}]: tokens were added, or the adapter "
            f"is for another base model; {merge_advice(source)}"
        )
    if (largest := max(rows.ids, default=0)) >= size:
        raise AdapterError(
            f"{source}: trainable_token_indices has {largest}, and {name} has {size} tokens; a "
            "larger vocabulary is another base model"
        )
    if site.path not in manifest.matrices:
        raise AdapterError(
            f"{rows.asked_by}: its rows replace those of {site.path}, of which the engine has no "
            "floats; build one without --quantize"
        )
