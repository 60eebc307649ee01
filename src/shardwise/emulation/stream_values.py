"""Words of host memory that CUDA streams write and wait for, by the driver's own calls: none of
them takes a multiprocessor.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_MAPPED = 3  # portable, and mapped into the device's addresses
_FROM = 0  # a wait for a word of this value or above


class StreamValues:
    """The words of a page of host memory, by their number; `memory` is any writable buffer."""

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory = (ctypes.c_char * nbytes).from_buffer(memory)
        self._address = ctypes.addressof(self._memory)
        _check(int(torch.cuda.cudart().cudaHostRegister(self._address, nbytes, _MAPPED)), "map")
        self._driver = _driver()

    def write(self, stream: int, word: int, value: int) -> None:
        """When the stream comes to this point. `stream` is the driver's handle."""
        call = self._driver.cuStreamWriteValue32_v2
        _check(call(stream, self._address + 4 * word, value, 0), "write")

    def wait(self, stream: int, word: int, value: int) -> None:
        """The stream goes on when the word has reached the value."""
        call = self._driver.cuStreamWaitValue32_v2
        _check(call(stream, self._address + 4 * word, value, _FROM), "wait for")

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(
            f"CUDA could not {what} a word of host memory (error {code}); an emulated network on a "
            "GPU needs stream memory operations"
        )
