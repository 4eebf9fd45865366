"""Prepare pictures, captions and masks into a verified cache; see `prep --help`."""
