"""The decorator of the Triton kernels: one compiled variant a block size, whatever the numbers passed.

Triton compiles a variant more for an integer argument that is 1 or a multiple of 16, and for a pointer that is not
aligned. A planner meets all of those, at random, in a training loop; so nothing is specialised here but the dtypes of
tensors and the arguments in capitals. `FLAGS` go with each launch: products and sums are rounded one by one.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.jit import JITFunction

FLAGS = {"enable_fp_fusion": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` for the GPU on its first launch, specialised by its arguments in capitals alone."""
    names = [name for name in inspect.signature(function).parameters if not name.isupper()]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


def is_interpreted(function: Any) -> bool:
    """Whether a kernel runs on CPU tensors, under `TRITON_INTERPRET=1`, rather than on a GPU."""
    return not isinstance(function, JITFunction)
