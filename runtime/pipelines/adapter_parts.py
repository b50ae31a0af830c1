"""Which components of a pipeline take an adapter's tensors, by its headers: no value is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.formats.diffusion.spellings import COMPONENTS
from trt_lora.runtime.adapters.load import load_adapter, looks_like_adapter
from trt_lora.runtime.manifest import Manifest


@dataclass(frozen=True)
class AdapterParts:
    """What becomes of an adapter's tensors."""

    paths: Mapping[str, Path]  # what each component loads, of those that take some
    left_over: Mapping[str, str]  # tensor -> why no component takes it

    def told(self, coverage: Coverage) -> Coverage:
        """Return the coverage of one component with what no component takes, and nothing else."""
        elsewhere = dict.fromkeys(coverage.unexpected_keys, "another component takes it")
        ignored = {**coverage.ignored, **elsewhere}
        ignored = {name: why for name, why in ignored.items() if name not in self.left_over}
        return replace(coverage, unexpected_keys=self.left_over, ignored=ignored)


@dataclass(frozen=True)
class _Preview:
    """What one component would make of the adapter."""

    bound: frozenset[str]  # tensors
    of_others: frozenset[str]
    ignored: dict[str, str]
    unexpected: dict[str, str]

    @property
    def taken(self) -> frozenset[str]:
        """The tensors that are bound, or known to have no effect here."""
        return self.bound | (self.ignored.keys() - self.of_others)


def adapter_parts(path: Path, manifests: Mapping[str, Manifest], *, strict: bool) -> AdapterParts:
    """Return which components take which tensors of an adapter.

    Args:
        path: what `load_adapter` reads, or a directory with such directories, named like the
            components.
        manifests: of the pipeline's engines, by component.
        strict: refuse a tensor that no component takes.

    Raises:
        AdapterError: the adapter cannot be read, is for another base model, or has a tensor that
            no component takes, or that several do; or it has none for this pipeline.
    """
    own = _folders(path)
    previews, errors = dict[str, _Preview](), dict[str, AdapterError]()
    for name, manifest in manifests.items():
        if own and name not in own:
            continue
        try:
            previews[name] = _preview(own.get(name, path), manifest)
        except AdapterError as error:  # a file without prefixes may be for another component
            errors[name] = error
    if not own:
        _check_single(path, previews)
    taken = frozenset[str]().union(*(each.taken for each in previews.values()))
    of_lost = {t for each in previews.values() for t in each.of_others} - taken
    paths = {name: own.get(name, path) for name, each in previews.items() if each.bound}
    if errors and (of_lost or own or not paths):
        raise next(iter(errors.values()))
    whys = [*(p.ignored for p in previews.values()), *(p.unexpected for p in previews.values())]
    left_over = {t: why for each in whys for t, why in each.items() if t not in taken}
    if own:  # whose tensors may have equal names
        left_over |= {t: why for each in previews.values() for t, why in each.unexpected.items()}
    left_over |= {str(own[n]): "its component has no engine here" for n in own.keys() - manifests}
    if (strict and left_over) or not paths:
        raise _refusal(path, manifests, left_over)
    return AdapterParts(paths, left_over)


def _folders(path: Path) -> dict[str, Path]:
    """The adapters of single components in a directory that is none itself."""
    if looks_like_adapter(path):
        return {}
    folders = {name: path / name for name in COMPONENTS if (path / name).is_dir()}
    return {name: folder for name, folder in folders.items() if looks_like_adapter(folder)}


def _preview(path: Path, manifest: Manifest) -> _Preview:
    adapter = load_adapter(path, manifest)
    coverage = preview_adapter(adapter, manifest, strict=False)
    bound = frozenset(coverage.bound)
    return _Preview(
        bound, adapter.of_others, dict(coverage.ignored), dict(coverage.unexpected_keys)
    )


def _check_single(path: Path, previews: Mapping[str, _Preview]) -> None:
    """Refuse a tensor without a prefix that several components could take."""
    for tensor in sorted(frozenset[str]().union(*(each.bound for each in previews.values()))):
        takers = [name for name, each in previews.items() if tensor in each.bound]
        if len(takers) > 1:
            raise AdapterError(
                f"{path}: {tensor:.200} fits {' and '.join(takers)}; say which it is for: put the "
                f"adapter into a directory of that name, DIR/{takers[0]}, and load DIR"
            )


def _refusal(
    path: Path, manifests: Mapping[str, Manifest], left_over: Mapping[str, str]
) -> AdapterError:
    here = f"the engines of this pipeline ({', '.join(manifests)})"
    if not left_over:
        return AdapterError(f"{path} holds no tensors for {here}")
    why = listed([f"{name} ({reason})" for name, reason in left_over.items()])
    return AdapterError(
        f"{path}: {len(left_over)} of its tensors are taken by none of {here}: {why}. Check that "
        "the adapter is for this base model, or build the engine of its component too; "
        "strict=False leaves such tensors out"
    )
