"""The replicas of a step: their variables, and what they exchange and compare."""
