"""One module per model family: facts, text, the call of its denoiser, sample pictures, and names of LoRA layers."""
