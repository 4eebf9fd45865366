"""The denoiser and its LoRA adapters."""
