"""Keras in double precision: in double, equal is 1e-10, and rounding hides no fault.

Importing this module changes the process. The processes of a pool follow it.
"""

from lockstep.keras_compat import compute_in_float64

compute_in_float64()
