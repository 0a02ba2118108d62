from posix.types cimport pid_t


# Stands for "failed, but errno was 0".
cdef enum:
    UNSPECIFIED = -1

# The failure that a verb's return value tells, as an errno; call it before anything
# else can change errno. Providers return an errno, or -1 and set it.
cdef int failure(int rc) noexcept nogil
cdef void clear_errno() noexcept nogil
cdef int last_errno() noexcept nogil
cdef int raise_verbs_error(int error, str verb, str detail=*, str hint=*) except -1


# Where a handle was made: fork() copies handles that only the parent may use.
cdef struct Process:
    unsigned long forks
    pid_t pid

cdef Process this_process() noexcept
cdef bint is_this_process(Process process) noexcept nogil
cdef int check_process(Process process, str what) except -1
