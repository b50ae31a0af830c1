"""As much of Dynamo 1.6.1 as a worker imports: what is told of adapters is kept in order."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HELPERS = ("engine", "health_check", "publisher", "run", "worker")


class Refused(Exception):
    """Any of Dynamo's errors."""


class InvalidArgument(Refused):
    """The request's fault."""


class EngineShutdown(Refused):
    """The worker ends."""


class Unknown(Refused):
    """The engine's fault."""


@dataclass
class FakeDynamo:
    """What the front end was told, and what it says next."""

    told: list[tuple[str, str]] = field(default_factory=list)
    registered: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None  # of the next registration

    async def register_model(
        self, model_input: object, model_type: object, endpoint: str, path: str, **fields: Any
    ) -> None:
        """Publish a name, or fail."""
        if self.error is not None:
            raise self.error
        self.registered.append({"endpoint": endpoint, "path": path, **fields})
        self.told.append(("published", fields["lora_name"]))

    async def unregister_model(self, endpoint: str, lora_name: str) -> None:
        """Retract a name."""
        assert endpoint == "endpoint"
        self.told.append(("retracted", lora_name))


class FakeContext:
    """Of one request."""

    def __init__(self, number: str = "1", *, is_stopped: bool = False) -> None:
        self._number, self._is_stopped = number, is_stopped

    def id(self) -> str:
        """Which request it is."""
        return self._number

    def is_stopped(self) -> bool:
        """Whether nobody waits for it."""
        return self._is_stopped


def install(patch: pytest.MonkeyPatch) -> FakeDynamo:
    """Let Python import the fake."""
    fake = FakeDynamo()
    backend = "dynamo.common.backend"
    modules: dict[str, dict[str, Any]] = {
        f"{backend}.engine": {
            "LLMEngine": object,
            "EngineConfig": SimpleNamespace,
            "LlmRegistration": SimpleNamespace,
        },
        f"{backend}.health_check": {"build_health_check_payload": _payload},
        f"{backend}.publisher": {"ComponentSnapshot": dict, "PushSource": SimpleNamespace},
        f"{backend}.run": {"run": lambda engine: None},
        f"{backend}.worker": {"WorkerConfig": SimpleNamespace},
        "dynamo.common.utils.token_ids": {"normalize_request_token_ids": lambda request: request},
        "dynamo.llm": {
            "ModelInput": SimpleNamespace(Tokens="tokens"),
            "ModelRuntimeConfig": SimpleNamespace,
            "ModelType": SimpleNamespace(Chat=1, Completions=2),
            "WorkerType": SimpleNamespace(Aggregated="aggregated"),
            "lora_name_to_id": len,
            "register_model": fake.register_model,
            "unregister_model": fake.unregister_model,
        },
        "dynamo.llm.exceptions": {
            "InvalidArgument": InvalidArgument,
            "EngineShutdown": EngineShutdown,
            "Unknown": Unknown,
        },
    }
    for name, found in modules.items():
        module = ModuleType(name)
        vars(module).update(found)
        patch.setitem(sys.modules, name, module)
    for name in ("dynamo", "dynamo.common", backend, "dynamo.common.utils"):
        patch.setitem(sys.modules, name, ModuleType(name))
    return fake


def _payload(*, bos_token_id: int) -> dict[str, Any]:
    stop = {"max_tokens": 1, "ignore_eos": True}
    return {"token_ids": [bos_token_id], "stop_conditions": stop, "_HEALTH_CHECK": True}
