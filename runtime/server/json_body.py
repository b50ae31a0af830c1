"""Read the JSON body of a request into a msgspec Struct, or refuse it as vLLM does."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from trt_lora.runtime.server.errors import GONE, HttpError
from trt_lora.runtime.server.json_values import BodyT, decoded
from trt_lora.runtime.server.telemetry.request_record import record_of

_TIMEOUT_S = 30.0  # for a whole body


async def read_body(request: Request, kind: type[BodyT]) -> BodyT:
    """Return the body of a request.

    Raises:
        HttpError: 400; it is no JSON of that kind, or is deeper than 64. 408; it takes longer than
            30 s. 413; see `Guard`. As in vLLM, fields that are unknown are ignored.
    """
    given = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if given != "application/json":
        raise HttpError(400, "Unsupported Media Type: Only 'application/json' is allowed")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            raw = await request.body()
        record_of(request.scope).body_bytes = len(raw)
        return decoded(raw, kind)
    except TimeoutError as error:
        raise HttpError(408, f"the body has not come within {_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise HttpError(GONE, "the client is gone") from error
