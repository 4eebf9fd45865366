"""Claims that end the process which takes a task; they must be in a module, for other processes import them."""

from __future__ import annotations

import os
import signal

from prep.encode.engines.claims import SharedClaims


class Unsendable(Exception):
    def __reduce__(self):
        raise TypeError("not for sending")


class Killed(SharedClaims):
    def take(self, task: str) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False


class Ended(SharedClaims):
    def take(self, task: str) -> bool:
        os._exit(3)


class Broken(SharedClaims):
    def take(self, task: str) -> bool:
        raise Unsendable("what cannot be sent")
