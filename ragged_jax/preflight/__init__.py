"""What a program will do on its devices, found out from the compiler alone."""

from ._hlo import Collective as Collective
from ._hlo import HloReport as HloReport
from ._hlo import hlo_report as hlo_report
