"""Edits captions and masks from the pages: where they are written, what they replaced, and what they change."""
