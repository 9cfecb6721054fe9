"""What the kernel asks of engines and trainers."""
