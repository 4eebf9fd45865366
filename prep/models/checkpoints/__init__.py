"""Files of weights: read into the form of their use, with their scales applied; what single files have."""
