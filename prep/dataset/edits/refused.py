"""An edit that is not made, and why."""

from __future__ import annotations


class Refused(Exception):
    """An edit that is refused. `status` is of HTTP: 400 if it cannot be saved, 409 if the page is out of date."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
