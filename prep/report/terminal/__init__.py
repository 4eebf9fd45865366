"""Reports as text for terminals and pipes."""
