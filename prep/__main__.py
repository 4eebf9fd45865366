"""Runs `prep` as `python -m prep`."""

from __future__ import annotations

from prep.cli.main import main

if __name__ == "__main__":
    main()
