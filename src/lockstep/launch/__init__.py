"""Starts the processes of a run, and reads from the environment who started this one.

No module here imports a framework.
"""
