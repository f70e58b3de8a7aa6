"""The flight recorder: what a training that halted leaves behind.

After each step a few numbers start their way to the host, and the batch is kept until they say that
the step was good. A step that halts changes nothing, so that the state still has the parameters
from before it. State and batch are then written to a folder, the capture, and the loop stops.
`load_capture` reads it, and `diagnose` takes its arguments.
"""

from clipgrad._recorder.capture import Capture as Capture
from clipgrad._recorder.capture import load_capture as load_capture
from clipgrad._recorder.folders import mounted_folder as mounted_folder
from clipgrad._recorder.recorder import FlightRecorder as FlightRecorder
from clipgrad._recorder.recorder import HaltedError as HaltedError
