"""Files of an adapter that may be read again, and what shows that they are the same."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter, preview_adapter
from trt_lora.runtime.adapters.load import files_fingerprint, load_adapter
from trt_lora.runtime.manifest import Manifest


@dataclass(frozen=True)
class AdapterSource:
    """Files of an adapter, read for one engine as often as need be."""

    manifest: Manifest
    path: Path
    strict: bool

    def open(self) -> Adapter:
        """Read the headers.

        Raises:
            AdapterError: it cannot be read.
        """
        return load_adapter(self.path, self.manifest)

    def preview(self, adapter: Adapter) -> Coverage:
        """Check all but the values of what `open` returned.

        Raises:
            AdapterError: the engine cannot take it.
        """
        return preview_adapter(adapter, self.manifest, strict=self.strict)

    def fingerprint(self) -> str:
        """Return a hash of the files' names, and of their sizes and a sample of their bytes.

        Raises:
            AdapterError: a file cannot be read.
        """
        return files_fingerprint(self.path)

    def read(self, adapter: Adapter) -> Fitted:
        """Read, check and cast the values of what `open` returned.

        Raises:
            AdapterError: it cannot be read, or the engine cannot take it.
        """
        return fit_adapter(adapter, self.manifest, strict=self.strict)


def host_nbytes(coverage: Coverage) -> int:
    """Return the bytes of an adapter's tensors in host memory."""
    return sum(site.nbytes for site in coverage.sites)


def content_hash(fitted: Fitted) -> str:
    """Return the SHA-256 over names, dtypes, shapes and values as the engine takes them.

    Equal for adapters that make the same answers, whatever their files look like.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(fitted.tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(tensor.read_storage().data)
    return digest.hexdigest()
