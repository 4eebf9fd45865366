"""One module per model family: its facts, and how its pipeline encodes text."""
