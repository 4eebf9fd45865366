"""What is predicted and what the loss is."""
