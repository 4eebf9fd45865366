"""What was trained, added to the weights of its model (`train merge`), and LoRA files of lower rank."""
