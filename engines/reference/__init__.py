"""Plain torch in fp64 or fp32: the specification every engine is held to, and the engine of last resort."""

from .adapter import ENGINE
from .nsa import selection_backward, selection_forward, selection_forward_reference
from .sdpa import SdpaGrads, sdpa_backward, sdpa_forward
from .values import check_values, first_bad_value

__all__ = ["ENGINE", "SdpaGrads", "check_values", "first_bad_value", "sdpa_backward", "sdpa_forward",
           "selection_backward", "selection_forward", "selection_forward_reference"]
