"""The flight recorder: what a training that halted leaves behind."""

from clipgrad._recorder.capture import Capture as Capture
from clipgrad._recorder.capture import load_capture as load_capture
from clipgrad._recorder.recorder import FlightRecorder as FlightRecorder
from clipgrad._recorder.recorder import HaltedError as HaltedError
