"""What embeddings say of a set of pictures: look-alikes, outliers, clusters, leaks, captions that do not fit."""
