"""An edit that is not made, and why."""

from __future__ import annotations


class Refused(Exception):
    """`status` is of HTTP: 400 for what cannot be saved, 409 for what is no longer as the page has it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
