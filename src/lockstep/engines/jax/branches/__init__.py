"""Branches of one model on different devices: the program of a step, cut into stages."""
