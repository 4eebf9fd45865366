"""`train merge`: what was trained, added to the weights of its model."""
