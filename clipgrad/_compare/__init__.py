"""Two versions of one loss, or of one training step: where they first differ.

Each version becomes a record: a table of the arrays that were seen, in the order of computation,
with sketches of their numbers, and edges between them. A file is the table. To compare is to match
the rows of two records, to judge each pair by what rounding does to it, and to tell the first that
differs, with the module of the operations behind it.
"""

from clipgrad._compare.compare import compare as compare
from clipgrad._compare.file import check_path as check_path
from clipgrad._compare.file import save_record as save_record
from clipgrad._compare.record import THE_LOSS as THE_LOSS
from clipgrad._compare.record import TORCH as TORCH
from clipgrad._compare.record import Edge as Edge
from clipgrad._compare.record import Record as Record
from clipgrad._compare.record import Row as Row
from clipgrad._compare.result import GradientComparison as GradientComparison
from clipgrad._compare.save_run import save_run as save_run
from clipgrad._compare.sketches import turned_sketches as turned_sketches
from clipgrad._compare.wider import WIDER_DTYPES as WIDER_DTYPES
