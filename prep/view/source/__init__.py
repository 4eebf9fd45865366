"""Pictures that are not encoded yet: a directory, a recipe or tars, for the pages."""
