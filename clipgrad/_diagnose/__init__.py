"""Diagnosis of a gradient: where it is NaN, where it grows, shrinks and underflows."""

from clipgrad._diagnose.captured_args import CapturedArgs as CapturedArgs
from clipgrad._diagnose.diagnose import diagnose as diagnose
from clipgrad._diagnose.diagnosis import GradientDiagnosis as GradientDiagnosis
from clipgrad._diagnose.origins import operands_of as operands_of
from clipgrad._diagnose.origins import origins as origins
from clipgrad._diagnose.probe import RESULT as RESULT
from clipgrad._diagnose.probe import STATE as STATE
from clipgrad._diagnose.probe import Probe as Probe
from clipgrad._diagnose.probe import Site as Site
from clipgrad._diagnose.subject import DiagnosisSubject as DiagnosisSubject
from clipgrad._diagnose.subject import subject as subject
