"""The parts of HTML pages, snapshots and live ones: templates, cards, tables, charts, pictures under masks."""
