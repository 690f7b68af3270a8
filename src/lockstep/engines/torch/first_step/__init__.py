"""What is compared before the first update, and what is proved of the layers."""
