"""What the kernel records and shows of a run."""
