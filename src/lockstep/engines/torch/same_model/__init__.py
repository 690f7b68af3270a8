"""What makes the processes equal: the model, what its code reads, random numbers, settings."""
