"""One way from an errno to an exception."""

from libc cimport errno as c_errno
from posix.unistd cimport getpid

import errno as _errno
import os

cdef extern from *:
    """
    #include <pthread.h>

    static unsigned long rdmaview_forks;

    static void rdmaview_count_fork(void)
    {
        rdmaview_forks++;
    }

    static int rdmaview_watch_forks(void)
    {
        return pthread_atfork(NULL, NULL, rdmaview_count_fork);
    }
    """
    const unsigned long rdmaview_forks
    int rdmaview_watch_forks() nogil


class VerbsError(OSError):
    """A verb failed.

    Parameters
    ----------
    errno : int
        As the verb set or returned it; 0 if it failed without saying why.
    verb : str
        The call that failed, as ``"ibv_reg_mr"``.
    detail : str, default ""
        The values that the call was given.
    hint : str, default ""
        What to do.

    Attributes
    ----------
    errno, verb, detail, hint
        As above.
    """

    def __init__(self, errno, verb, detail="", hint=""):
        reason = os.strerror(errno) if errno else "unspecified error"
        text = f"{verb}: {reason}"
        if detail:
            text += f": {detail}"
        if hint:
            text += f". {hint}"
        super().__init__(errno, text)
        self.verb = verb
        self.detail = detail
        self.hint = hint

    def __reduce__(self):
        return type(self), (self.errno, self.verb, self.detail, self.hint)


class DeviceNotFoundError(OSError):
    """There is no such device, or none to choose from.

    Parameters
    ----------
    text : str
        What is there, and what to do.
    """

    def __init__(self, text):
        super().__init__(_errno.ENODEV, text)

    def __reduce__(self):
        return type(self), (self.strerror,)


class StaleViewError(ValueError):
    """The registration of a view was closed."""


class NotRegisteredError(LookupError):
    """No registered segment covers the whole of a range of memory."""


class DetachedViewError(ValueError):
    """A view was rebuilt from its values and has no memory to touch."""


class WorkCompletionError(OSError):
    """A work request that was waited for ended with a bad status.

    Parameters
    ----------
    completion : WorkCompletion
        The completion, with the request's two ranges.

    Attributes
    ----------
    completion : WorkCompletion
    status : Status
    vendor_err : int
    local : MemoryRegionView
        The local range, detached.
    remote : RemoteView
        The remote range.
    first_error : WorkCompletion or None
        What broke the queue pair first, if this is a consequence of it.
    completed : int
        How many requests of a batch were done: the first ones. 0 for a single request.
    """

    def __init__(self, completion):
        super().__init__(_errno.EIO, str(completion))
        self.completion = completion
        self.status = completion.status
        self.vendor_err = completion.vendor_err
        self.local = completion.local
        self.remote = completion.remote
        self.first_error = completion.first_error
        self.completed = completion.completed

    def __reduce__(self):
        return type(self), (self.completion,)


cdef int failure(int rc) noexcept nogil:
    if rc == 0:
        return 0
    return rc if rc > 0 else last_errno()


cdef void clear_errno() noexcept nogil:
    c_errno.errno = 0


cdef int last_errno() noexcept nogil:
    return c_errno.errno if c_errno.errno > 0 else UNSPECIFIED


cdef int raise_verbs_error(int error, str verb, str detail="", str hint="") except -1:
    raise VerbsError(0 if error == UNSPECIFIED else error, verb, detail, hint)


cdef Process this_process() noexcept:
    cdef Process process
    process.forks = rdmaview_forks
    process.pid = getpid()
    return process


cdef bint is_this_process(Process process) noexcept nogil:
    # A counter that fork() itself moves on: getpid() would be a system call.
    return process.forks == rdmaview_forks


cdef int check_process(Process process, str what) except -1:
    if is_this_process(process):
        return 0
    raise VerbsError(
        _errno.EPERM,
        what,
        f"made in process {process.pid}, used in process {getpid()}",
        "A fork inherits no device: open it anew in the child, or start the child "
        "with multiprocessing's spawn or forkserver",
    )


if rdmaview_watch_forks() != 0:
    raise MemoryError("pthread_atfork failed")
