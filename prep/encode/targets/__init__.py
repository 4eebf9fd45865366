"""The rows that an encode makes: their keys, and what makes each, computed from pictures, captions and prompts."""
