"""Tests of what the engines have in common; each backend runs them."""
