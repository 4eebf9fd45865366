"""Safetensors files of anybody: headers read with bounds, tensors with digests; and ours, written in one order."""
