"""Plans the steps: which samples form each."""
