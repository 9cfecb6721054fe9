"""The run's workers: started, restarted, added, removed, and told of each other."""
