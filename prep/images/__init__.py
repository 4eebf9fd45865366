"""Picture files to pixels: where Pillow is used."""
