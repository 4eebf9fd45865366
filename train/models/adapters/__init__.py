"""Adapters in LoRA files of any program: which layers they are on, what scales them, whether their shapes fit."""
