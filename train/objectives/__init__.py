"""The forward pass and the loss."""
