"""The denoiser and its adapters."""
