"""What is compared before the first update, and what `verify` sees of a step."""
