"""Single-device files out of old multi-GPU ones.

The public functions are `lockstep.inspect`, `lockstep.rescue` and
`lockstep.load_weights`; they live in `front.py`. One file here per kind of old
file, per step of the way out of it, and per kind of file that is written.
"""
