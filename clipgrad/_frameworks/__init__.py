"""Models of flax and Equinox as trees of arrays.

1. `take_apart` makes `Parameters` from what a user trains: the arrays to differentiate, the state
   that a call changes, and all else. There is a class for each kind: trees, Equinox, flax NNX.
2. So a function of models becomes a function of arrays, which JAX can differentiate and compile.
3. Afterwards the model gets its changed state back, as from the framework's own ``grad``.
4. `attribute_names` gives submodules names meanwhile, their attribute paths.
"""

from clipgrad._flax import is_diff_state as is_diff_state
from clipgrad._flax import is_model as is_model
from clipgrad._frameworks.equinox import has_modules as has_modules
from clipgrad._frameworks.nnx import Pure as Pure
from clipgrad._frameworks.nnx import model_value_and_grad as model_value_and_grad
from clipgrad._frameworks.nnx import paths_of_arrays as paths_of_arrays
from clipgrad._frameworks.nnx import with_models as with_models
from clipgrad._frameworks.nnx import without_variables as without_variables
from clipgrad._frameworks.nnx_parameters import differentiated_inputs as differentiated_inputs
from clipgrad._frameworks.packed import as_static as as_static
from clipgrad._frameworks.packed import from_static as from_static
from clipgrad._frameworks.packed import with_leaves as with_leaves
from clipgrad._frameworks.parameters import Parameters as Parameters
from clipgrad._frameworks.take_apart import take_apart as take_apart
