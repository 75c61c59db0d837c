"""The error that the ghost engine raises for a loss it cannot handle, so that another engine takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from dpopt.common.names import first_line


class CannotFollow(Exception):
    """The ghost engine cannot trace this loss; ``primitive`` names the operation or the error that stopped it."""

    def __init__(self, primitive: str, reason: str, error: Exception | None = None):
        self.primitive = primitive
        where = f"primitive '{primitive}'" if error is None else f"this loss ({primitive})"
        super().__init__(f"ghost clipping cannot follow {where}: {reason}")


@contextlib.contextmanager
def planning() -> Generator[None]:
    """Turns every error raised inside into `CannotFollow`: the engine failed, not the loss, and another may succeed."""
    try:
        yield
    except CannotFollow:
        raise
    except Exception as error:
        raise CannotFollow(type(error).__name__, first_line(error), error) from error
