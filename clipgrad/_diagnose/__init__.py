"""Diagnosis of a gradient: where it is NaN, where it grows, shrinks and underflows."""

from clipgrad._diagnose.diagnose import diagnose as diagnose
from clipgrad._diagnose.diagnosis import GradientDiagnosis as GradientDiagnosis
from clipgrad._diagnose.findings import raised_finding as raised_finding
from clipgrad._diagnose.raised import is_of_callback as is_of_callback
from clipgrad._diagnose.raised import raised_in as raised_in
from clipgrad._diagnose.raised import told_error as told_error
from clipgrad._diagnose.subject import CapturedArgs as CapturedArgs
from clipgrad._diagnose.subject import DiagnosisSubject as DiagnosisSubject
from clipgrad._diagnose.subject import subject as subject
