"""Progress of a build that keeps the notes, or stops at a stage."""

from trt_lora.builder.progress import NoProgress


class Notes(NoProgress):
    """Keeps what a build tells its user."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        """Keep it."""
        self.notes.append(message)


class StopAt(NoProgress):
    """Raises when a stage begins."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self._stage, self._error = stage, error

    def stage(self, name: str) -> None:
        """Raise, if it is the one."""
        if name == self._stage:
            raise self._error
