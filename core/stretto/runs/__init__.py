"""The life of a run: its kernels from command to summary, its replay, and its handle in a program."""
