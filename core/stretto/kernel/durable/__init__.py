"""What survives the kernel: journal, checkpoints, recovery."""
