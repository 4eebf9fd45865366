"""The names of a LoRA's layers in files: the records that families fill, and those of a UNet."""
