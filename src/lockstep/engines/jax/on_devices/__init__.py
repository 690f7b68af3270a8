"""Data of a fit that stay on the devices."""
