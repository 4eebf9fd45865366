"""A drawn dataset, a tiny model and a recipe, so that everything runs with no download."""
