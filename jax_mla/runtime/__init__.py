"""What connects a program to the GPU: the FFI library, the cubins and the driver.

Importing this and calling `register` needs no GPU, driver or cuda-python; the other functions do.
"""

from jax_mla.runtime.device import unsupported_reason
from jax_mla.runtime.loader import load
from jax_mla.runtime.registration import EXCHANGE_TARGET, TARGET, register

__all__ = ["EXCHANGE_TARGET", "TARGET", "load", "register", "unsupported_reason"]
