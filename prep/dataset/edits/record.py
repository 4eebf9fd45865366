"""Notes in a recipe where its edits are, once one is saved, so that the next command uses them."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from prep.errors import Problem, first_line
from prep.recipe.edits import record_edits


class Recorder:
    """Writes `[edits]` into a recipe that lacks it, the first time it is called. Threads may share it."""

    def __init__(self, recipe: Path, folder: Path) -> None:
        self._recipe, self._folder, self._lock, self._done = recipe, folder, Lock(), False

    def __call__(self) -> str:
        """Records the edits; returns a note for the user, with a space before, or "" if nothing has changed."""
        with self._lock:
            done, self._done = self._done, True
        try:
            if done or not record_edits(self._recipe, self._folder):
                return ""
        except (OSError, ValueError, Problem) as error:
            return (f" {self._recipe.name} could not be changed ({first_line(error)}): add --edits {self._folder} to "
                    "the next commands.")
        return f" {self._recipe.name} now names the edits: [edits]."
