"""The flight recorder: what a training that halted leaves behind.

1. `recorder` keeps the batch of each step (`step_record`), and starts to copy a few numbers to the
   host, which say whether the step was good (`flag`). It reads the numbers that have arrived.
2. A step that halts changes nothing, so the state still has the parameters from before the step.
3. `files` writes state and batch to a folder, the capture, whole or not at all; leaves are stored
   by their `paths`. Then the loop stops.
4. `capture` reads the folder again, for `diagnose`.
"""

from clipgrad._recorder.capture import Capture as Capture
from clipgrad._recorder.capture import load_capture as load_capture
from clipgrad._recorder.folders import mounted_folder as mounted_folder
from clipgrad._recorder.recorder import FlightRecorder as FlightRecorder
from clipgrad._recorder.recorder import HaltedError as HaltedError
