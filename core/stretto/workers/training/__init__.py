"""The trainer: batches, calls, publication, checkpoints."""
