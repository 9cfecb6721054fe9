"""Commands that verify a run: audit and replay."""
