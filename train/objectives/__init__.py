"""Predictions and the loss."""
