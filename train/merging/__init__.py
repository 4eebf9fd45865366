"""What was trained, added to the weights of its model (`train merge`); LoRA files of lower rank, and of differences."""
