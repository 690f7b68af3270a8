"""What a checkpoint reads of a fit, and sets."""
