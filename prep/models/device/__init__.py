"""What encoders ask of a device: batches that its memory holds, and how the CPU allocates."""
