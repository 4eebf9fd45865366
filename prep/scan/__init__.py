"""The scan of `prep scan`: examines pictures, captions and masks, and finds duplicates."""
