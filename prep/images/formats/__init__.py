"""Picture formats by their bytes, without decoding."""
