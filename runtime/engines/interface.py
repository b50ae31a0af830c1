"""An engine's manifest against itself, and against the ports of the engine's own file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.contract.sites import MAX_RANK, VECTORS, parse_binding
from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.plugins.contract.step import CACHE, CROSS, LOGITS, NEW_CACHE
from trt_lora.plugins.errors import BackendError, ManifestError
from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.files.stored_matrix import bias_of
from trt_lora.runtime.manifest import GRAPH, MANIFEST_FILE, Binding, Manifest
from trt_lora.runtime.memory.dtypes import DTYPES


@dataclass(frozen=True)
class Port:
    """An input or output of a graph or plan."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]  # None: of any size


def check_interface(
    file: object,
    manifest: Manifest,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    *,
    are_shapes_known: bool = True,
) -> None:
    """Refuse a file that the manifest does not speak of, by names, dtypes and shapes.

    Args:
        file: the graph or plan, for messages.
        manifest: that of its directory.
        inputs: of the file, in any order.
        outputs: of the file, in any order.
        are_shapes_known: a dimension of any size in the file is one in the manifest too.

    Raises:
        BackendError: they differ; the message says where.
    """
    for kind, found, expected in (
        ("inputs", inputs, manifest.inputs),
        ("outputs", outputs, manifest.outputs),
    ):
        known = are_shapes_known, manifest.kind == GRAPH  # exporters say less than can be inferred
        if differences := list(_differences(found, expected, known)):
            raise BackendError(
                f"{file} has other {kind} than its manifest: {listed(differences, '; ')}; copy or "
                "build the engine again"
            )


def _differences(
    found: Sequence[Port], expected: Sequence[Binding], known: tuple[bool, bool]
) -> Iterator[str]:
    """`known`: whether the file knows every shape, and may know more of them than the manifest."""
    ports = {port.name: port for port in found}
    names = [binding.name for binding in expected]
    yield from (f"no {name}" for name in names if name not in ports)
    yield from (f"{name} too" for name in ports if name not in names)
    for binding in expected:
        port = ports.get(binding.name)
        if port is not None and not _is_same(port, binding, *known):
            shape = [size if size is not None else "any" for size in port.shape]
            yield (
                f"{binding.name} is {port.dtype} {shape}, and not {binding.dtype} "
                f"{list(binding.shape)}"
            )


def _is_same(port: Port, binding: Binding, are_shapes_known: bool, may_know_more: bool) -> bool:
    sizes = _sizes(binding)
    if len(sizes) != len(port.shape) or port.dtype != binding.dtype:
        return False
    pairs = zip(port.shape, sizes, strict=True)
    return all(
        has == says or (not are_shapes_known if has is None else may_know_more and says is None)
        for has, says in pairs
    )


def _sizes(binding: Binding) -> list[int | None]:
    """The shape, with None for a symbol, which is a dimension of any size."""
    return [size if isinstance(size, int) else None for size in binding.shape]


# ---------------------------------------------------------------------- the manifest against itself


def check_manifest(directory: Path, manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself.

    Raises:
        ManifestError: it does; the message says in what.
    """
    of_tokens = () if manifest.kind == GRAPH else (_outputs, _cache, _cross_cache)
    checks = (_numbers, _bindings, *of_tokens, _slots, _sites)
    if faults := [fault for check in checks for fault in check(manifest)]:
        raise ManifestError(
            f"{directory / MANIFEST_FILE} contradicts itself: {listed(faults, '; ')}; copy or "
            "build the engine again"
        )


def _numbers(manifest: Manifest) -> Iterator[str]:
    limits = {"max_lora_rank": MAX_RANK, "opt_lora_rank": manifest.max_lora_rank}
    lengths = {"max_batch_size": None, "max_seq_len": None, "max_input_len": manifest.max_seq_len}
    for name, most in (limits if manifest.kind == GRAPH else lengths | limits).items():
        value = getattr(manifest, name)
        if value < 1 or (most is not None and value > most):
            yield f"{name} is {value}, expected 1 to {most or 'any'}"


def _bindings(manifest: Manifest) -> Iterator[str]:
    if manifest.dtype not in {b.dtype for b in (*manifest.inputs, *manifest.outputs)}:
        yield f"dtype is {shown(manifest.dtype)}, which no input or output has"
    for kind, bindings in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        if len({binding.name for binding in bindings}) < len(bindings):
            yield f"{kind} have a name twice"
        for binding in bindings:
            are_sizes = all(isinstance(size, str) or size > 0 for size in binding.shape)
            if binding.dtype not in DTYPES or not are_sizes:
                yield f"{binding.name} is {shown(binding.dtype)} {list(binding.shape)}"


def _outputs(manifest: Manifest) -> Iterator[str]:
    """Logits come first; an output of the cache is written in place of its own input."""
    names = [output.name for output in manifest.outputs]
    if names[:1] != [LOGITS] or [*map(type, manifest.outputs[0].shape[-1:])] != [int]:
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


def _cross_cache(manifest: Manifest) -> Iterator[str]:
    """The encoder writes what the step reads, and a decoder alone reads nothing of the kind."""
    read = [(b.name, b.dtype, b.shape) for b in manifest.inputs if b.name.startswith(CROSS)]
    if manifest.encoder is None:
        yield from (f"there is an input {name}, and no encoder" for name, *_ in read[:1])
        return
    written = [(o.in_place_of, o.dtype, o.shape) for o in manifest.encoder.outputs]
    if not read or sorted(map(str, read)) != sorted(map(str, written)):
        yield f"its encoder writes {len(written)} values, not the {len(read)} that its step reads"
    if {shape[2:3] for *_, shape in read} - {(manifest.encoder.max_source_len,)}:
        yield f"its cross cache has no {manifest.encoder.max_source_len} positions in a row"


def _sites(manifest: Manifest) -> Iterator[str]:
    """Every site has all its inputs, and no input is a site's that is none."""
    both = (*manifest.inputs, *(manifest.encoder.inputs if manifest.encoder else ()))
    inputs = {binding.name: binding for binding in both}
    slots, rank = ([None], manifest.max_lora_rank) if manifest.max_loras else ([], 0)
    for name, (site, factor) in manifest.lora_bindings.items():
        sizes = [*slots, *(size or None for size in site.shape(factor, rank))]
        if name not in inputs:
            yield f"site {site.path} has no input {name}"
        elif (inputs[name].dtype, _sizes(inputs[name])) != (site.dtype, sizes):
            yield f"{name} is {list(inputs[name].shape)}, its site has k {site.k} and n {site.n}"
        if site.parts and sum(site.parts) != site.n:
            yield f"the parts {site.parts} of {site.path} are not {site.n} together"
    for name in inputs.keys() - manifest.lora_bindings.keys():
        if parse_binding(name) is not None:
            yield f"{name} is the input of no site"
    sizes_of = {site.path: (site.k, site.n) for site in manifest.sites}
    stored = sizes_of | {bias_of(site.path): (1, site.n) for site in manifest.sites}
    for path, matrix in manifest.matrices.items():
        if stored.get(path) != (matrix.k, matrix.n) or matrix.offset < 0:
            yield f"the matrix of {path} is [{matrix.k}, {matrix.n}] at {matrix.offset}"
    if len(sizes_of) < len(manifest.sites):
        yield "sites have a path twice"


def _slots(manifest: Manifest) -> Iterator[str]:
    """Stacks have as many slots as the manifest says, in every profile; without, rows have none."""
    if not manifest.max_loras:
        names = sorted({LORA_SLOT, LORA_RANK} & {binding.name for binding in manifest.inputs})
        yield from (f"there is an input {name}, and max_loras is 0" for name in names)
        return
    for profile, ranges in manifest.profiles.items():
        stacks = ranges.keys() & manifest.lora_bindings
        is_vector = {name: manifest.lora_bindings[name][1] in VECTORS for name in stacks}
        most = {(ranges[name].max[0] - is_vector[name],) for name in stacks}
        if found := most - {(manifest.max_loras,)}:
            yield f"profile {shown(profile)} has {found} slots, max_loras is {manifest.max_loras}"
