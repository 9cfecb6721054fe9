"""Commands that prove a run: audit and replay."""
