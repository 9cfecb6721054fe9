"""The files that a run leaves in its folder, as other processes read them: views, commands, trackers."""
