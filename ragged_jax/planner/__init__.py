"""Chooses layouts: which tensors share a slab, at which offsets, for how many shards.

Framework-free: JAX and torch jobs run what this package says.
"""

from ._advice import advise as advise
from ._group import Group as Group
from ._hardware import PROFILES as PROFILES
from ._hardware import HardwareProfile as HardwareProfile
from ._hardware import hardware as hardware
from ._picture import draw as draw
from ._plan import plan as plan
from ._report import BucketReport as BucketReport
from ._report import Plan as Plan
