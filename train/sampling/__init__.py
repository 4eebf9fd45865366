"""Pictures from prompts."""
