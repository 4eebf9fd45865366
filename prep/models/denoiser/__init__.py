"""What denoisers take: sizes and widths, levels of noise, schedulers; latents and text in the forms they want."""
