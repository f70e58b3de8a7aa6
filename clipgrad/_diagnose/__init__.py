"""Diagnosis of a gradient: where it is NaN, where it grows, shrinks, underflows or is cut.

1. `measure`: a compiled backward pass measures the cotangents of each part of the program; sizes
   are judged by these (`trends`, `underflow`).
2. `tape`: only if something is not finite, exactly zero or raises, the loss runs on a tape. It has
   an entry for each operation: what it read and made, and the cotangents of both. An entry that
   holds a program is opened only where it is guilty (`openings`).
3. `guilty`: which entry makes good into bad is one comparison on it; the answer is an argument, a
   constant, an operation, a sum of cotangents, or a cut (`origins`).
4. `nan_judge` and `zeros` choose the answer that counts, `causes` say why a cotangent ends, and
   `finding_texts` and `advice` say what happened, with its numbers, and what to write instead.
"""

from clipgrad._diagnose.captured_args import CapturedArgs as CapturedArgs
from clipgrad._diagnose.diagnose import diagnose as diagnose
from clipgrad._diagnose.diagnosis import GradientDiagnosis as GradientDiagnosis
from clipgrad._diagnose.finding_texts import error_text as error_text
from clipgrad._diagnose.finding_texts import raised_finding as raised_finding
from clipgrad._diagnose.nan_judge import raised_in as raised_in
from clipgrad._diagnose.tape import is_of_callback as is_of_callback
