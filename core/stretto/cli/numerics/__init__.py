"""`stretto numerics`: compare the trainer and the engine of a run on the user's own model."""
