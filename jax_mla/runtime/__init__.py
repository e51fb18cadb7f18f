"""What connects a program to the GPU: the FFI library, the cubins and the driver.

Importing this and calling `register` needs no GPU, driver or cuda-python; the other functions do.
"""

from jax_mla.runtime.device import unsupported_reason
from jax_mla.runtime.loader import load
from jax_mla.runtime.registration import TARGET, register

__all__ = ["TARGET", "load", "register", "unsupported_reason"]
