"""Keep freed memory in the process while training on a CPU, and give it back afterwards."""

import ctypes
import gc
import logging
import platform

logger = logging.getLogger(__name__)

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks instead of giving them back. Returns whether it understood.

    Activations of a CPU training step are blocks of many megabytes. By default each is mapped afresh and unmapped when
    freed, so that every step pays the kernel for zeroing gigabytes of pages.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, TOP_PAD_BYTES))
    understood = all(mallopt(key, value) == 1 for key, value in settings)
    logger.debug("glibc keeps freed memory: %s", understood)
    return understood


def give_back_freed_memory() -> bool:
    """Return freed memory to the system, when a training stage is over and servers need it. Returns whether any was."""
    gc.collect()
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0) == 1)
    except (OSError, AttributeError):
        return False
