"""Which samples form which step."""
