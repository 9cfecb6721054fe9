"""The run's workers: their start, restart and end, and the routes between them."""
