"""`python -m train`."""

from __future__ import annotations

from train.cli.main import main

if __name__ == "__main__":
    main()
