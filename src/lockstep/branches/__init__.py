"""Branches of one model on different devices."""

from lockstep.branches.placing import Placement as Placement
