"""Contradictions inside a manifest: what one field says of an engine, and another one denies.

What an engine's own file tells is compared when that is opened, see `interface.py`.
"""

from collections.abc import Iterator
from pathlib import Path

from trt_lora.plugins.contract.sites import FACTORS, MAX_RANK, parse_binding
from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.plugins.contract.step import CACHE, LOGITS, NEW_CACHE
from trt_lora.plugins.errors import ManifestError
from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.manifest import MANIFEST_FILE, Binding, Dimension, Manifest
from trt_lora.runtime.memory.dtypes import DTYPES


def check_manifest(directory: Path, manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself.

    Raises:
        ManifestError: it does; the message says in what.
    """
    checks = (_numbers, _bindings, _outputs, _cache, _sites)
    if faults := [fault for check in checks for fault in check(manifest)]:
        raise ManifestError(
            f"{directory / MANIFEST_FILE} contradicts itself: {listed(faults, '; ')}; copy or "
            "build the engine again"
        )


def _numbers(manifest: Manifest) -> Iterator[str]:
    longest = manifest.max_seq_len
    for name, value, most in (
        ("max_batch_size", manifest.max_batch_size, None),
        ("max_seq_len", longest, None),
        ("max_input_len", manifest.max_input_len, longest),
        ("max_lora_rank", manifest.max_lora_rank, MAX_RANK),
        ("opt_lora_rank", manifest.opt_lora_rank, manifest.max_lora_rank),
    ):
        if value < 1 or (most is not None and value > most):
            yield f"{name} is {value}, expected 1 to {most or 'any'}"


def _bindings(manifest: Manifest) -> Iterator[str]:
    if manifest.dtype not in {b.dtype for b in (*manifest.inputs, *manifest.outputs)}:
        yield f"dtype is {shown(manifest.dtype)}, which no input or output has"
    for kind, bindings in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        names = [binding.name for binding in bindings]
        if len(set(names)) < len(names):
            yield f"{kind} have a name twice"
        for binding in bindings:
            if binding.dtype not in DTYPES or not all(map(_is_size, binding.shape)):
                yield f"{binding.name} is {shown(binding.dtype)} {list(binding.shape)}"


def _outputs(manifest: Manifest) -> Iterator[str]:
    """Logits come first; an output of the cache is written in place of its own input."""
    names = [output.name for output in manifest.outputs]
    if names[:1] != [LOGITS] or not _is_number(manifest.outputs[0].shape[-1:]):
        yield f"the first output is {shown(names[:1])}, expected {LOGITS} [..., vocabulary]"
        return
    for output in manifest.outputs:
        inside = output.name.removeprefix(NEW_CACHE)
        expected = f"{CACHE}{inside}" if inside != output.name else ""
        if output.in_place_of != expected:
            yield f"{output.name} is in place of {shown(output.in_place_of)}, expected {expected!r}"
    ids = (*manifest.base_model.stop_token_ids, manifest.base_model.pad_token_id)
    if not all(0 <= token < manifest.vocabulary_size for token in ids):
        yield f"token ids {ids} of the base model are beyond {manifest.vocabulary_size} tokens"


def _cache(manifest: Manifest) -> Iterator[str]:
    """A static cache has an output for each input, and room for every token."""
    inputs = {b.name: b for b in manifest.inputs if b.name.startswith(CACHE)}
    outputs = {b.in_place_of: b for b in manifest.outputs if b.in_place_of}
    if inputs.keys() != outputs.keys():
        yield f"the KV cache has {len(inputs)} inputs and {len(outputs)} outputs"
        return
    for name, cached in inputs.items():
        written = outputs[name]
        is_same = (cached.dtype, cached.shape) == (written.dtype, written.shape)
        if not is_same or cached.shape[2:3] != (manifest.max_seq_len,) or len(cached.shape) != 4:
            yield f"{name} is {list(cached.shape)}, with {manifest.max_seq_len} tokens in a row"


def _sites(manifest: Manifest) -> Iterator[str]:
    """Every site has its two inputs, and no input is a site's that is none."""
    inputs = {binding.name: binding for binding in manifest.inputs}
    rank = manifest.max_lora_rank if manifest.max_loras else None
    yield from _slots(manifest)
    for name, (site, factor) in manifest.lora_bindings.items():
        k_by_r = [site.k, rank] if factor == FACTORS[0] else [rank, site.n]
        if name not in inputs:
            yield f"site {site.path} has no input {name}"
        elif not _fits(inputs[name], site.dtype, k_by_r, with_slots=bool(manifest.max_loras)):
            yield f"{name} is {list(inputs[name].shape)}, its site has k {site.k} and n {site.n}"
        if site.parts and sum(site.parts) != site.n:
            yield f"the parts {site.parts} of {site.path} are not {site.n} together"
    for name in inputs.keys() - manifest.lora_bindings.keys():
        if parse_binding(name) is not None:
            yield f"{name} is the input of no site"
    if len(manifest.lora_bindings) < 2 * len(manifest.sites):
        yield "sites have a path twice"


def _slots(manifest: Manifest) -> Iterator[str]:
    """Stacks have as many slots as the manifest says, in every profile; without, rows have none."""
    if not manifest.max_loras:
        names = sorted({LORA_SLOT, LORA_RANK} & {binding.name for binding in manifest.inputs})
        yield from (f"there is an input {name}, and max_loras is 0" for name in names)
        return
    for profile, ranges in manifest.profiles.items():
        stacks = ranges.keys() & manifest.lora_bindings
        if found := {ranges[name].max[:1] for name in stacks} - {(manifest.max_loras,)}:
            yield f"profile {shown(profile)} has {found} slots, max_loras is {manifest.max_loras}"


def _fits(binding: Binding, dtype: str, k_by_r: list[int | None], *, with_slots: bool) -> bool:
    """Whether an input is A [k, r] or B [r, n], or a stack of it; None is a symbol."""
    sizes = [size if isinstance(size, int) else None for size in binding.shape]
    return (binding.dtype, sizes) == (dtype, [None, *k_by_r] if with_slots else k_by_r)


def _is_size(size: object) -> bool:
    return isinstance(size, str) or (isinstance(size, int) and size > 0)


def _is_number(sizes: tuple[Dimension, ...]) -> bool:
    return bool(sizes) and isinstance(sizes[0], int)
