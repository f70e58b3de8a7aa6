"""The dependence of each value of a program on its inputs, and the rounding of its results.

Rounding answers whether a difference could be rounding: a traced program runs again with each
number moved by one rounding of its own type, up or down as a seed says. The checker and `compare`
read how far the results move. There is no second model of rounding in this library.
"""

from clipgrad._program.dependence import active_variables as active_variables
from clipgrad._program.dependence import dependence as dependence
from clipgrad._program.dependence import dependent_variables as dependent_variables
from clipgrad._program.dependence import sources_of_results as sources_of_results
from clipgrad._program.rounded import Parts as Parts
from clipgrad._program.rounded import measuring as measuring
from clipgrad._program.rounded import mixed as mixed
from clipgrad._program.rounded import one_promotion as one_promotion
from clipgrad._program.rounded import rounded as rounded
from clipgrad._program.rounded import rounded_in_float64 as rounded_in_float64
