"""The gradient checker: finite differences that support a VJP, or name the wrong element."""

from clipgrad._check.check_grads import check_grads as check_grads
from clipgrad._check.numerical import numerical_grad as numerical_grad
from clipgrad._check.options import CHECKS as CHECKS
from clipgrad._check.options import Options as Options
from clipgrad._check.report import GradCheckError as GradCheckError
from clipgrad._check.report import GradCheckReport as GradCheckReport
