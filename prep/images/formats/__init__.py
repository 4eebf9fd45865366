"""Picture formats, checked byte by byte without decoding."""
