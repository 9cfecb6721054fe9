"""The events of a run: their files, and the history computed from them."""
