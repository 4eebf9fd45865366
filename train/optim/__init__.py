"""Learning rate and moving average."""
