"""What a program will do on its devices, found out from the compiler alone."""

from ._hlo import Collective as Collective
from ._hlo import HloReport as HloReport
from ._hlo import hlo_report as hlo_report
from ._overlap import Move as Move
from ._overlap import OverlapReport as OverlapReport
from ._overlap import ScheduledCollective as ScheduledCollective
from ._overlap import overlap_report as overlap_report
