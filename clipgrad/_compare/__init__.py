"""Two versions of one loss, or of one training step: where they first differ.

1. Record each version: a table of arrays in the order of computation (`Row`), with sketches of
   their numbers (`Numbers`), and edges between them. A file is the table.
2. Match the rows of two records, by names (lines too) or by numbers, each pair with its `Judgment`:
   a `Matching`. Leaves that are elsewhere in the other version are `MovedLeaves`.
3. Read the judgments, by what rounding does (`by_rounding`) or by what a wider type makes of them
   (`ByPrecision`): a `Verdict` with the first that differs, and the module of the operations
   behind it.
4. Give the result, in one place: findings, the table, notes.
"""

from clipgrad._compare.compare import compare as compare
from clipgrad._compare.file import check_path as check_path
from clipgrad._compare.file import save_record as save_record
from clipgrad._compare.record import THE_LOSS as THE_LOSS
from clipgrad._compare.record import TORCH as TORCH
from clipgrad._compare.record import Edge as Edge
from clipgrad._compare.record import Numbers as Numbers
from clipgrad._compare.record import Record as Record
from clipgrad._compare.record import Row as Row
from clipgrad._compare.result import GradientComparison as GradientComparison
from clipgrad._compare.save_run import save_run as save_run
from clipgrad._compare.sketches import turned_sketches as turned_sketches
from clipgrad._compare.wider import WIDER_DTYPES as WIDER_DTYPES
