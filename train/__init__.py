"""Train from a manifest and its cache; see `train --help`."""
