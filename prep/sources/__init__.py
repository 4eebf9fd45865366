"""Where pictures come from; all yield the same items."""
