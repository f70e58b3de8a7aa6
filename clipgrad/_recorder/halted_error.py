"""The error of a training that has halted."""

import pathlib


class HaltedError(RuntimeError):
    """A step of the training was bad, and its capture is written.

    Attributes:
      path: the capture, for `load_capture`; ``None`` if it could not be written.
    """

    def __init__(self, path: pathlib.Path | None, message: str = "") -> None:
        super().__init__(message or f"the training has halted; its capture is {path}")
        self.path = path

    def __reduce__(self) -> tuple:
        return type(self), (self.path, str(self))
