"""Starts the processes of `lockstep run`, waits for them and starts them again.

No module here imports a framework.
"""
