"""One run of an engine on torch's tensors, in as many batches as it needs."""

from collections.abc import Mapping

import torch

from trt_lora.runtime.pipelines.engines import PipelineEngines


def run_engine(
    engines: PipelineEngines,
    component: str,
    tensors: Mapping[str, torch.Tensor],
    adapter: str | None,
) -> dict[str, torch.Tensor]:
    """Return the outputs, in float32 on the CPU.

    Args:
        engines: of the pipeline.
        component: which of them runs.
        tensors: by input, on any device and in any dtype; the rows of the first are the batch.
            Those that the engine has no input for are left out, as in ComfyUI's own models.
        adapter: None is the base model.

    Raises:
        TensorError: an input is missing, or the engine was not built for a size.
    """
    manifest = engines.engines[component].manifest
    bindings = {binding.name: binding for binding in manifest.inputs}
    arrays = {n: _on_host(t, bindings[n].dtype) for n, t in tensors.items() if n in bindings}
    first = next(iter(arrays))
    symbol, rows = bindings[first].shape[0], len(arrays[first])
    most = max((ranges[first].max[0] for ranges in manifest.profiles.values()), default=rows)
    parts = []
    for start in range(0, rows, most):
        part = {
            name: array[start : start + most] if bindings[name].shape[0] == symbol else array
            for name, array in arrays.items()
        }
        inputs = {name: array.numpy() for name, array in part.items()}
        parts.append(engines.run(component, inputs, adapter=adapter))
    return {
        name: torch.cat([torch.from_numpy(part[name]).float() for part in parts])
        for name in parts[0]
    }


def _on_host(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """On the CPU in the engine's dtype; numpy has no bfloat16, to which `Engine.run` rounds."""
    wanted = torch.float32 if dtype == "bfloat16" else getattr(torch, dtype)
    return tensor.detach().to("cpu", wanted)
