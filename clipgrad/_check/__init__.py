"""The gradient checker: three computations of a gradient in float64, of which two must agree.

1. `checked_function` makes a plain function of the chosen inputs and outputs. `witnesses` has the
   gradient as your rule computes it and as plain AD does, and `slopes` finite differences.
2. `check_point` asks two questions about each element: is the formula right, which `majority`
   decides from the three, and is the arithmetic, so that the computed gradient is the rule's? A
   verdict is a value (`verdict`); of two the more severe counts.
3. `further` asks both again at another point, and `behavior` and `contract` check all else: types,
   linearity, compiled and batched calls.
4. `log` collects failures and notes, and `report` is the result.

All numbers that decide are in `tolerances`, all options in `options`.
"""

from clipgrad._check.behavior import CHECKS as CHECKS
from clipgrad._check.check_grads import check_grads as check_grads
from clipgrad._check.numerical import numerical_grad as numerical_grad
from clipgrad._check.report import GradCheckError as GradCheckError
from clipgrad._check.report import GradCheckReport as GradCheckReport
