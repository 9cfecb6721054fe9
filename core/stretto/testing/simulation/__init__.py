"""The kernel and the workers of a run in one process, in virtual time, searched by seeds."""
