"""Layers on several devices."""
