"""Two versions of one loss, or of one training step: where they first differ."""

from clipgrad._compare.compare import compare as compare
from clipgrad._compare.comparison import GradientComparison as GradientComparison
from clipgrad._compare.port_record import PortEntry as PortEntry
from clipgrad._compare.port_record import PortRun as PortRun
from clipgrad._compare.rounding import WIDER_DTYPES as WIDER_DTYPES
from clipgrad._compare.save_run import check_path as check_path
from clipgrad._compare.save_run import save_run as save_run
from clipgrad._compare.save_run import write_port as write_port
from clipgrad._compare.signatures import layouts as layouts
