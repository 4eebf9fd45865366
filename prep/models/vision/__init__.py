"""Vision models that embed pictures."""
