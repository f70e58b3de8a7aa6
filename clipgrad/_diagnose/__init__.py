"""Diagnosis of a gradient: where it is NaN, where it grows, shrinks, underflows or is cut.

A compiled pass measures the cotangents and judges. Only if something is not finite, exactly zero or
raises, the loss runs on a tape, which has an entry for each operation: what it read and made, and
the cotangents of both. A finding is one comparison on one entry: it makes good into bad. An entry
that holds a program is opened only where it is guilty.
"""

from clipgrad._diagnose.captured_args import CapturedArgs as CapturedArgs
from clipgrad._diagnose.diagnose import diagnose as diagnose
from clipgrad._diagnose.diagnosis import GradientDiagnosis as GradientDiagnosis
from clipgrad._diagnose.finding_texts import error_text as error_text
from clipgrad._diagnose.finding_texts import raised_finding as raised_finding
from clipgrad._diagnose.nan_judge import raised_in as raised_in
from clipgrad._diagnose.tape import is_of_callback as is_of_callback
