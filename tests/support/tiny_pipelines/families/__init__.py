"""A complete pipeline per function, each named after its family, freshly initialized."""
