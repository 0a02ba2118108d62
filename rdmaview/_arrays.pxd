from libc.stdint cimport uint64_t

from ._view cimport Registration, rdmaview_remote, rdmaview_view


# Packed views, as C sees them: read them by rdmaview_at(start, stride, i), with or
# without the GIL; they never change while a reference to the array is held.
cdef class PackedViews:
    cdef char *start
    cdef Py_ssize_t count
    # Bytes from one to the next; negative in a reversed array.
    cdef Py_ssize_t stride
    # What keeps them: a ViewBlock, or the NumPy array of a choice of others.
    cdef object memory

    cdef Py_ssize_t item_size(self)
    cdef char *item_format(self)
    cdef object item(self, Py_ssize_t i)
    # An array of the same kind and registrations, of other packed views.
    cdef PackedViews like(
        self, char *start, Py_ssize_t count, Py_ssize_t stride, object memory
    )


cdef class ViewArray(PackedViews):
    # Those that the views are cut from, by id, and perhaps more; None if detached.
    cdef tuple registrations


cdef class RemoteViewArray(PackedViews):
    pass


# Whoever makes an array fills `start` with `count` packed views before it shows it.
cdef ViewArray new_view_array(Py_ssize_t count, tuple registrations)
cdef RemoteViewArray new_remote_view_array(Py_ssize_t count)
# Give back what an array has at its end and does not use.
cdef int shorten(PackedViews views, Py_ssize_t count) except -1
cdef ViewArray cut_many(
    const rdmaview_view *whole, Registration registration, object offsets, object sizes
)
cdef tuple sort_registrations(object registrations)
cdef Py_ssize_t find_registration(tuple registrations, uint64_t id) noexcept
cdef int check_array_attached(ViewArray views, str use) except -1
cdef ViewArray as_view_array(object views, str what)
cdef RemoteViewArray as_remote_view_array(object views, str what)


# A column of numbers: one for all, or one each.
cdef class Column:
    cdef const uint64_t *values
    # In items; 0 if there is one for all.
    cdef Py_ssize_t step
    # -1 if there is one for all.
    cdef Py_ssize_t count
    cdef bint is_signed
    cdef uint64_t single
    cdef Py_buffer buffer
    cdef uint64_t *own
    cdef str name

    cdef str text(self, Py_ssize_t i)


cdef Column parse_column(object numbers, str name)
cdef Py_ssize_t common_count(Column first, Column second) except -1
