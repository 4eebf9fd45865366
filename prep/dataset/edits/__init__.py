"""Edited captions and masks: where they are written, what they replaced, and how they are applied."""
