"""vLLM's Triton LoRA kernels, loaded from its source without the rest of vLLM.

The folder is vLLM's `vllm/lora/ops/triton_ops` (Apache-2.0), of any commit whose functions take
what is known here. Nothing of it is part of this repository. What the files import from the rest of
vLLM is replaced by stand-ins: Triton itself, a logger, constants.
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from trt_lora.plugins.errors import ConfigError

PACKAGE = "vllm.lora.ops.triton_ops"
SHRINK, EXPAND, TABLES = "lora_shrink_op", "lora_expand_op", "utils"
FILES = (f"{SHRINK}.py", f"{EXPAND}.py", "kernel_utils.py", f"{TABLES}.py")

Routes = Mapping[str, Any]  # which rows belong to which adapter, by the name of the argument


@dataclass(frozen=True)
class VllmOperators:
    """vLLM's two operators, and the tables of addresses that they keep."""

    folder: Path
    _shrink: Callable[..., None]
    _expand: Callable[..., None]
    _tables: tuple[dict[Any, Any], ...]

    def route(self, rows: Sequence[int], slots: int, where: torch.device) -> Routes:
        """Return the arguments that say which adapter each row takes.

        vLLM's own are as long as its largest batch; the kernels run for the active adapters alone,
        which is its graph for that many.

        Args:
            rows: the slot of each; -1 is the base model, which vLLM counts as one more adapter.
            slots: that the stacks have.
            where: the stacks are.
        """
        active = sorted(set(rows))
        behind = slots + 1 - len(active)
        counts = [*(rows.count(slot) for slot in active), *[0] * behind]
        in_order = sorted(range(len(rows)), key=rows.__getitem__)

        def tensor(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=where)

        return {
            "token_lora_mapping": tensor(rows),
            "token_indices_sorted_by_lora_ids": tensor(in_order),
            "num_tokens_per_lora": tensor(counts),
            "lora_token_start_loc": tensor(itertools.accumulate(counts, initial=0)),
            "lora_ids": tensor([*active, *[-1] * behind]),
            "no_lora_flag_cpu": torch.tensor([all(slot < 0 for slot in rows)]),
            "num_active_loras": torch.tensor([len(active)], dtype=torch.int32),
        }

    def shrink(
        self, x: torch.Tensor, a: Sequence[torch.Tensor], t: torch.Tensor, routes: Routes
    ) -> None:
        """Write `t [slices, m, rank] = x @ A`; A [slots, rank, k] of every slice."""
        known = {"inputs": x, "lora_a_weights": list(a), "output_tensor": t, "scaling": 1.0}
        self._shrink(**_arguments(self._shrink, known, routes))

    def expand(
        self, t: torch.Tensor, b: Sequence[torch.Tensor], y: torch.Tensor, routes: Routes
    ) -> None:
        """Add `t @ B` to `y [m, n_1 + n_2 + ...]`; B [slots, n, rank] of every slice."""
        known = {"inputs": t, "lora_b_weights": list(b), "output_tensor": y, "offset_start": 0}
        self._expand(**_arguments(self._expand, known | {"add_inputs": True}, routes))

    def forget(self) -> None:
        """Empty the tables: they know weights by their addresses, which come again."""
        for table in self._tables:
            table.clear()


def load_vllm(folder: Path) -> VllmOperators:
    """Load the operators from `folder`.

    Raises:
        ConfigError: a file is missing, imports what has no stand-in, or takes what is not known.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}; pass vLLM's folder vllm/lora/ops/triton_ops"
        )
    _stand_in(folder.resolve())
    try:
        modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in (SHRINK, EXPAND)]
        tables = importlib.import_module(f"{PACKAGE}.{TABLES}")
        shrink, expand = modules[0].lora_shrink, modules[1].lora_expand
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"vLLM's files in {folder} cannot be loaded ({error}); take another commit of vLLM"
        ) from error
    # By their names, _LORA_A_PTR_DICT and the like: a module's builtins are a dict as well.
    kept = tuple(value for name, value in vars(tables).items() if name.endswith("_PTR_DICT"))
    operators = VllmOperators(folder, shrink, expand, kept)
    for operator in (shrink, expand):
        _check_arguments(operator, operators.route([0], 1, torch.device("cpu")))
    return operators


def installed_vllm() -> Path | None:
    """Return the folder of an installed vLLM; nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent / "lora" / "ops" / "triton_ops"


_OURS = ("inputs", "lora_a_weights", "lora_b_weights", "output_tensor")
_OPTIONS = ("scaling", "offset_start", "add_inputs")


def _check_arguments(operator: Callable[..., None], routes: Routes) -> None:
    known = {*_OURS, *_OPTIONS, *routes}
    parameters = inspect.signature(operator).parameters.values()
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in known]
    if unknown:
        raise ConfigError(
            f"vLLM's {operator.__name__} takes {', '.join(unknown)}, which is not known here; "
            "take another commit of vLLM"
        )


def _arguments(operator: Callable[..., None], known: dict[str, Any], routes: Routes) -> Routes:
    """Those of the arguments that this version of the operator takes."""
    names = _parameters(operator)
    return {name: value for name, value in (known | dict(routes)).items() if name in names}


@functools.cache
def _parameters(operator: Callable[..., None]) -> frozenset[str]:
    return frozenset(inspect.signature(operator).parameters)


def _stand_in(folder: Path) -> None:
    """Register stand-ins for what the files import; an installed vLLM is left out of it."""
    for name, values in _stand_ins().items():
        module = ModuleType(name)
        module.__path__ = [str(folder)] if name == PACKAGE else []
        vars(module).update(values)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]  # of another folder


def _stand_ins() -> dict[str, dict[str, Any]]:
    """Stand-ins for modules of vLLM; parents before their children."""
    triton, language = map(importlib.import_module, ("triton", "triton.language"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("not registered with torch: the plain functions are called")

    def no(*args: Any, **kwargs: Any) -> bool:
        return False

    sizes = {"next_power_of_2": triton.next_power_of_2, "cdiv": triton.cdiv}
    register = {"direct_register_custom_op": refuse}
    platform = SimpleNamespace(is_cuda=lambda: True, is_rocm=no, has_device_capability=no)
    packages: dict[str, dict[str, Any]] = {
        name: {} for name in ("vllm", "vllm.lora", "vllm.lora.ops", PACKAGE, "vllm.model_executor")
    }
    return packages | {
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": no},
        "vllm.triton_utils": {"tl": language, "triton": triton, "HAS_TRITON": True},
        "vllm.envs": {
            "VLLM_TUNED_CONFIG_FOLDER": None,
            "VLLM_LORA_DISABLE_PDL": True,
            "VLLM_BATCH_INVARIANT": False,
        },
        "vllm.logger": {"init_logger": _logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": register | sizes,
        "vllm.utils.torch_utils": register,
        "vllm.utils.math_utils": sizes,
    }


def _logger(name: str) -> Any:
    """A logger with vLLM's additions; a message is worth a line of the debug log."""
    quiet = logging.getLogger(name).debug
    return SimpleNamespace(
        info=quiet, warning=quiet, debug=quiet, info_once=quiet, warning_once=quiet
    )
