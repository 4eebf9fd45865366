"""One module per model family: how its denoiser is called, and what it predicts."""
