"""The events of a run: their files, and the history that they give."""
