"""Checks what `--device` names before a command does anything else, even if it turns out to have nothing to compute."""

from __future__ import annotations

from prep.runtime import defer_interrupts


def require_device(text: str, *, several: bool = False) -> None:
    """Raises `UsageError` unless this machine has the device in the text of `--device`; `several`: each of them.

    It loads torch, which takes seconds, unless the text is one that every machine has.
    """
    if text in ("auto", "cpu"):
        return
    with defer_interrupts():
        from prep.models.tensors import checked_device, device_names  # here: as said above
    if several:
        device_names(text)
    else:
        checked_device(text)
