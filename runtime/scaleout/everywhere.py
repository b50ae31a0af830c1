"""What every replica is asked at once: changes of adapters, and what is known of them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from trt_lora.runtime.server.errors import HttpError

_CHANGES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/v1/lora_adapters/")
_LOADS = {"/v1/load_lora_adapter": "lora_name", "/adapters": "name"}  # the body's field
_LISTS = ("/v1/lora_adapters", "/metrics")


class Whole(NamedTuple):
    """A replica's answer to a request that all were asked."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    path: str | None  # where the adapter lay before, if there was one

    @property
    def is_taken(self) -> bool:
        """Whether the replica has done what was asked."""
        return self.status < 400

    def response(self) -> Response:
        """Return it as the client's."""
        made = Response(self.body, self.status)
        made.raw_headers = list(self.headers)
        return made


def is_for_all(method: str, path: str) -> bool:
    """Whether all replicas are asked."""
    return path in _LISTS if method == "GET" else path.startswith(_CHANGES)


def loaded_name(path: str, body: bytes) -> str | None:
    """Return the adapter that a request loads; None where it loads none."""
    if path not in _LOADS:
        return None
    try:
        found = json.loads(body).get(_LOADS[path])
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def together(found: Sequence[Whole], path: str) -> Response:
    """Return one answer for all replicas."""
    taken = [whole for whole in found if whole.is_taken]
    if path in _LOADS and len(taken) < len(found):
        return _refused(found)
    if not taken:
        return found[0].response()
    if path == "/metrics":
        return Response(_metrics(taken), media_type="text/plain; version=0.0.4; charset=utf-8")
    if path == "/v1/lora_adapters":
        return JSONResponse(_adapters(taken))
    return taken[0].response()  # those that have refused do not have the adapter


def _refused(found: Sequence[Whole]) -> Response:
    """The answer of a replica that has refused, which says how many have."""
    first, *others = [whole for whole in found if not whole.is_taken]
    if len(others) + 1 == len(found):
        return first.response()
    names = ", ".join(whole.replica for whole in (first, *others))
    error = json.loads(first.body)["error"]
    text = f"{error['message']} (of {len(found)} replicas {names} refused; undone on the others)"
    return HttpError(first.status, text, error["param"], error["type"]).response()


def _adapters(found: Sequence[Whole]) -> dict[str, Any]:
    """Every adapter of every replica, with the replica's name."""
    lists = [(whole.replica, json.loads(whole.body)) for whole in found]
    data = [{**known, "replica": replica} for replica, told in lists for known in told["data"]]
    refused = [{**each, "replica": replica} for replica, told in lists for each in told["refused"]]
    return {"object": "list", "data": data, "refused": refused}


def _metrics(found: Sequence[Whole]) -> str:
    """All series, those of a replica labelled with its name."""
    lines: dict[str, list[str]] = {}  # by what is said of a family
    for whole in found:
        family = ""
        for line in whole.body.decode().splitlines():
            if line.startswith("#"):
                family = line if line.startswith("# HELP") else family
                known = lines.setdefault(family, [])
                if line not in known:
                    known.append(line)
            else:
                lines[family].append(_labelled(line, whole.replica))
    return "\n".join(line for family in lines.values() for line in family) + "\n"


def _labelled(line: str, replica: str) -> str:
    name, value = line.rsplit(" ", 1)
    label = f'replica="{replica}"'
    name = f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"
    return f"{name} {value}"
