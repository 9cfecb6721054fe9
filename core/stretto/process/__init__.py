"""The process that owns a run: its kernel, with server and observers, from the command to the summary."""
