"""The built-in device: limits, failures, delays and counters.

``soft0`` and ``soft1`` are RDMA devices in user space. These functions act on both
and on the whole process.
"""

import ctypes
import os

from .._library import soft_path
from .._verbs import refresh_limits

__all__ = ["configure", "counters", "delay", "fail", "path", "reset"]

_loaded = []


def configure(**limits):
    """Set limits of the device, named as in ibv_device_attr and ibv_port_attr.

    Some more: ``max_chain`` is how many work requests an ibv_post_send takes before it
    fails with ENOMEM; ``odp_general_caps`` and ``odp_rc_caps`` are those of
    ibv_query_device_ex.

    Contexts that are open see them at once; a queue pair keeps the max_msg_sz that it
    was created under.

    Parameters
    ----------
    **limits : int
        As ``max_mr=8``, ``max_mr_size=1 << 20``, ``max_msg_sz=4096``.

    Raises
    ------
    TypeError
        A value is no int.
    ValueError
        No such limit, or a value that it can't have. Those before it are set.
    """
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {value!r}")
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} must be from 0 to 2**64 - 1, not {value}")
        _check(
            _library().softverbs_configure(name.encode(), value),
            f"the built-in device can't set {name} to {value}",
        )
    refresh_limits()


def fail(verb, error, times=1):
    """Let the next calls of a verb fail.

    Parameters
    ----------
    verb : str
        Without ibv_, as ``"dereg_mr"``.
    error : int
        The errno. Negative: return -1 and set errno, as some drivers do. 0: fail
        without saying why, for verbs that return a pointer.
    times : int, default 1
        So many calls; 0 takes it back.

    Raises
    ------
    ValueError
        No such verb, one that can't fail so, or negative `times`.
    """
    if times < 0:
        raise ValueError(f"times can't be negative: {times}")
    _check(
        _library().softverbs_fail(verb.encode(), error, times),
        f"the built-in device can't let {verb!r} fail with {error}",
    )


def delay(what, seconds):
    """Let a verb take longer, or work complete later.

    Parameters
    ----------
    what : str
        A verb without ibv_, as ``"reg_mr"``; or ``"completion"``: work is done later,
        in the background.
    seconds : float
        0 takes it back.

    Raises
    ------
    ValueError
        No such verb, or not a time.
    """
    _check(
        _library().softverbs_delay(what.encode(), seconds),
        f"the built-in device can't delay {what!r} by {seconds} s",
    )


def counters():
    """Count the calls of each verb since the last `reset`.

    Returns
    -------
    dict of str to int
        By the verb's name without ibv_; and, as ``live_mr`` and so on, how many
        objects there are now.
    """
    library = _library()
    size = library.softverbs_counters(None, None, 0)
    names = (ctypes.c_char_p * size)()
    values = (ctypes.c_uint64 * size)()
    library.softverbs_counters(names, values, size)
    return {
        name.decode(): value for name, value in zip(names, values, strict=True) if name
    }


def reset():
    """Put limits, failures, delays and counters back; what is open stays open."""
    _library().softverbs_reset()
    refresh_limits()


def path():
    """Where the device's shared object is: a drop-in libibverbs.so.1.

    Returns
    -------
    str
    """
    return soft_path()


def _library():
    if not _loaded:
        library = ctypes.CDLL(soft_path())
        library.softverbs_configure.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        library.softverbs_fail.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_uint64,
        ]
        library.softverbs_delay.argtypes = [ctypes.c_char_p, ctypes.c_double]
        library.softverbs_counters.argtypes = [
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_size_t,
        ]
        library.softverbs_counters.restype = ctypes.c_size_t
        library.softverbs_reset.restype = None
        _loaded.append(library)
    return _loaded[0]


def _check(error, what):
    if error:
        raise ValueError(f"{what}: {os.strerror(error)}")
