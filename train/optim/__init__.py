"""Optimizers, learning rate and moving average."""
