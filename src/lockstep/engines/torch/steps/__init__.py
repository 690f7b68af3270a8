"""A step on the rows of one rank: its layers, losses and metrics, and steps of the user's own."""
