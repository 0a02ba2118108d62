from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from .libibverbs cimport (
    _compat_ibv_port_attr,
    ibv_comp_channel,
    ibv_context,
    ibv_cq,
    ibv_device,
    ibv_device_attr,
    ibv_fork_status,
    ibv_gid_entry,
    ibv_mr,
    ibv_pd,
    ibv_qp,
    ibv_qp_attr,
    ibv_qp_init_attr,
)


# One shared object's verbs, resolved. NULL is a symbol that this version lacks,
# which only the newer ones, named at the end, may be.
cdef struct VerbsTable:
    ibv_device **(*get_device_list)(int *) noexcept nogil
    void (*free_device_list)(ibv_device **) noexcept nogil
    ibv_context *(*open_device)(ibv_device *) noexcept nogil
    int (*close_device)(ibv_context *) noexcept nogil
    int (*query_device)(ibv_context *, ibv_device_attr *) noexcept nogil
    int (*query_port)(ibv_context *, uint8_t, _compat_ibv_port_attr *) noexcept nogil
    ibv_pd *(*alloc_pd)(ibv_context *) noexcept nogil
    int (*dealloc_pd)(ibv_pd *) noexcept nogil
    ibv_mr *(*reg_mr)(ibv_pd *, void *, size_t, int) noexcept nogil
    int (*dereg_mr)(ibv_mr *) noexcept nogil
    ibv_cq *(*create_cq)(
        ibv_context *, int, void *, ibv_comp_channel *, int
    ) noexcept nogil
    int (*destroy_cq)(ibv_cq *) noexcept nogil
    ibv_qp *(*create_qp)(ibv_pd *, ibv_qp_init_attr *) noexcept nogil
    int (*modify_qp)(ibv_qp *, ibv_qp_attr *, int) noexcept nogil
    int (*query_qp)(ibv_qp *, ibv_qp_attr *, int, ibv_qp_init_attr *) noexcept nogil
    int (*destroy_qp)(ibv_qp *) noexcept nogil
    int (*fork_init)() noexcept nogil
    ibv_mr *(*reg_mr_iova)(ibv_pd *, void *, size_t, uint64_t, int) noexcept nogil
    ibv_mr *(*reg_mr_iova2)(
        ibv_pd *, void *, size_t, uint64_t, unsigned int
    ) noexcept nogil
    ibv_mr *(*reg_dmabuf_mr)(
        ibv_pd *, uint64_t, size_t, uint64_t, int, int
    ) noexcept nogil
    ssize_t (*query_gid_table)(
        ibv_context *, ibv_gid_entry *, size_t, uint32_t, size_t
    ) noexcept nogil
    ibv_fork_status (*is_fork_initialized)() noexcept nogil


cdef class Library:
    cdef VerbsTable verbs
    cdef readonly str kind
    cdef readonly str path
    # Registrations made through this library by this process, ever.
    cdef bint has_registered
