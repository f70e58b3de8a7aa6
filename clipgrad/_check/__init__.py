"""The gradient checker: three witnesses of a gradient, in float64, of which two must agree.

At each element there are the rule as it is written, plain AD with the rules stripped, and slopes.
Two agree if they are apart by no more than a stated part, or three times one measured rounding. The
gradient as it is computed must then be the rule's; and then so at a further, generic point.
"""

from clipgrad._check.behavior import CHECKS as CHECKS
from clipgrad._check.check_grads import check_grads as check_grads
from clipgrad._check.numerical import numerical_grad as numerical_grad
from clipgrad._check.report import GradCheckError as GradCheckError
from clipgrad._check.report import GradCheckReport as GradCheckReport
