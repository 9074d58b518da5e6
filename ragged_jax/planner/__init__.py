"""Chooses layouts and schedules: what lies where, and which collectives move it when.

Framework-free: JAX and torch jobs run what this package says.
"""

from ._advice import advise as advise
from ._assign import assign_owners as assign_owners
from ._exchange import Exchange as Exchange
from ._exchange import Part as Part
from ._exchange import Round as Round
from ._exchange import Transfer as Transfer
from ._exchange import exchange as exchange
from ._group import Group as Group
from ._hardware import PROFILES as PROFILES
from ._hardware import HardwareProfile as HardwareProfile
from ._hardware import hardware as hardware
from ._owners import SHARDED as SHARDED
from ._owners import Matrix as Matrix
from ._owners import OwnerPlan as OwnerPlan
from ._owners import matrices as matrices
from ._picture import draw as draw
from ._plan import plan as plan
from ._redistribution import owner_exchange as owner_exchange
from ._redistribution import redistribution as redistribution
from ._report import BucketReport as BucketReport
from ._report import Plan as Plan
from ._simulate import BucketCost as BucketCost
from ._simulate import StepReport as StepReport
from ._simulate import bucket_costs as bucket_costs
from ._simulate import choose_step_schedule as choose_step_schedule
from ._simulate import simulate as simulate
from ._steps import Op as Op
from ._steps import StepSchedule as StepSchedule
from ._steps import step_schedule as step_schedule
from ._table import plain as plain
from ._table import plan_table as plan_table
from ._table import size as size
