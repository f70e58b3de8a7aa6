"""Clips of cotangents inside of the backward pass: on a value, a function, by name, everywhere.

1. `cotangent` has the one identity behind all of them: its backward pass applies a rule to the
   cotangent, which has been summed over all uses of the value.
2. `error_clip` puts this identity around a function, on its inputs and outputs.
3. `by_name` and `everywhere` trace a function, and evaluate the program again with the identity
   behind the chosen values; `named_rules` reads the choice.
4. `watch` returns statistics. A backward pass returns only cotangents, so statistics leave as the
   cotangent of a further argument, the probe.
"""

from clipgrad._error_clip.by_name import error_clip_by_name as error_clip_by_name
from clipgrad._error_clip.cotangent import clip_cotangent as clip_cotangent
from clipgrad._error_clip.error_clip import error_clip as error_clip
from clipgrad._error_clip.everywhere import error_clip_everywhere as error_clip_everywhere
from clipgrad._error_clip.named_rules import Rules as Rules
from clipgrad._error_clip.named_rules import check_call as check_call
from clipgrad._error_clip.named_rules import check_function as check_function
from clipgrad._error_clip.named_rules import checked_rules as checked_rules
from clipgrad._error_clip.named_rules import list_names as list_names
from clipgrad._error_clip.watch import value_and_grad_with_stats as value_and_grad_with_stats
from clipgrad._error_clip.watch import with_stats as with_stats
