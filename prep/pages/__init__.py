"""What HTML pages are made of, snapshots and live ones: templates, cards, tables, charts, pictures under masks."""
