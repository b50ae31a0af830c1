"""Import check for the optional dependencies torch, transformers and PEFT."""

from trt_lora.plugins.extras import extra


def require_peft(purpose: str) -> None:
    """Import torch, transformers and PEFT, which takes seconds, before anything is computed.

    Raises:
        BackendError: one of them is not installed; the message says which extra has it.
    """
    with extra("peft", purpose):
        import peft  # the first, since torch takes seconds  # noqa: F401

        import trt_lora.builder.checkpoint.base_model
        import trt_lora.scripts.verification.peft_reference  # noqa: F401
