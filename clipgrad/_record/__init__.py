"""Two versions of one loss, or of one training step: where they first differ.

Each version becomes a record: a table of the arrays that were seen, in the order of computation,
with sketches of their numbers, and edges between them. A file is the table. To compare is to match
the rows of two records, to judge each pair by what rounding does to it, and to tell the first that
differs, with the module of the operations behind it.
"""

from clipgrad._record.compare import compare as compare
from clipgrad._record.file import check_path as check_path
from clipgrad._record.file import save as save
from clipgrad._record.record import THE_LOSS as THE_LOSS
from clipgrad._record.record import TORCH as TORCH
from clipgrad._record.record import Record as Record
from clipgrad._record.record import Row as Row
from clipgrad._record.result import GradientComparison as GradientComparison
from clipgrad._record.save_run import save_run as save_run
from clipgrad._record.sketches import turned_sketches as turned_sketches
from clipgrad._record.wider import WIDER_DTYPES as WIDER_DTYPES
