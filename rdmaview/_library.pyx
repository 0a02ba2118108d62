"""Open libibverbs, or the built-in device, and resolve its verbs into one table.

Nothing is linked: the shared object is opened at its first use, so that
``import rdmaview`` works on a machine that has none.
"""

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym

import importlib.machinery
import os


cdef class Library:
    """One shared object that has the verbs.

    Attributes
    ----------
    kind : str
        ``"kernel"`` for libibverbs, ``"soft"`` for the built-in device.
    path : str
        What was handed to ``dlopen``.
    """

    def __init__(self, kind, path):
        cdef void *handle
        cdef list missing = []
        cdef VerbsTable *verbs = &self.verbs
        cdef bytes encoded = os.fsencode(path)
        cdef const char *file_name = encoded
        with nogil:
            handle = dlopen(file_name, RTLD_NOW | RTLD_LOCAL)
        if handle == NULL:
            raise OSError((<bytes>dlerror()).decode(errors="replace"))
        self.kind = kind
        self.path = path
        resolve(handle, "ibv_get_device_list", <void **>&verbs.get_device_list, missing)
        resolve(
            handle, "ibv_free_device_list", <void **>&verbs.free_device_list, missing
        )
        resolve(handle, "ibv_open_device", <void **>&verbs.open_device, missing)
        resolve(handle, "ibv_close_device", <void **>&verbs.close_device, missing)
        resolve(handle, "ibv_query_device", <void **>&verbs.query_device, missing)
        resolve(handle, "ibv_query_port", <void **>&verbs.query_port, missing)
        resolve(handle, "ibv_alloc_pd", <void **>&verbs.alloc_pd, missing)
        resolve(handle, "ibv_dealloc_pd", <void **>&verbs.dealloc_pd, missing)
        resolve(handle, "ibv_reg_mr", <void **>&verbs.reg_mr, missing)
        resolve(handle, "ibv_dereg_mr", <void **>&verbs.dereg_mr, missing)
        resolve(handle, "ibv_create_cq", <void **>&verbs.create_cq, missing)
        resolve(handle, "ibv_destroy_cq", <void **>&verbs.destroy_cq, missing)
        resolve(handle, "ibv_create_qp", <void **>&verbs.create_qp, missing)
        resolve(handle, "ibv_modify_qp", <void **>&verbs.modify_qp, missing)
        resolve(handle, "ibv_query_qp", <void **>&verbs.query_qp, missing)
        resolve(handle, "ibv_destroy_qp", <void **>&verbs.destroy_qp, missing)
        resolve(handle, "ibv_fork_init", <void **>&verbs.fork_init, missing)
        if missing:
            raise OSError(f"{path} lacks {', '.join(missing)}: it is no libibverbs")
        resolve(handle, "ibv_reg_mr_iova", <void **>&verbs.reg_mr_iova, missing)
        resolve(handle, "ibv_reg_mr_iova2", <void **>&verbs.reg_mr_iova2, missing)
        resolve(
            handle, "ibv_reg_dmabuf_mr", <void **>&verbs.reg_dmabuf_mr, missing
        )
        resolve(
            handle, "_ibv_query_gid_table", <void **>&verbs.query_gid_table, missing
        )
        resolve(
            handle,
            "ibv_is_fork_initialized",
            <void **>&verbs.is_fork_initialized,
            missing,
        )


cdef int resolve(
    void *handle, const char *symbol, void **slot, list missing
) except -1:
    slot[0] = dlsym(handle, symbol)
    if slot[0] == NULL:
        missing.append(symbol.decode())
    return 0


_opened = {}


def soft_path():
    """Where the built-in device's shared object is.

    Returns
    -------
    str
        An absolute path. A link to it named ``libibverbs.so.1``, in a directory
        of ``LD_LIBRARY_PATH``, lets any program of libibverbs run on the device.
    """
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    here = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(here, "softverbs", "_softverbs" + suffix)


def kernel_path():
    """The libibverbs that is used: ``$RDMAVIEW_LIBIBVERBS``, else the system's."""
    return os.environ.get("RDMAVIEW_LIBIBVERBS") or "libibverbs.so.1"


def open_library(kind):
    """Open a library once in a process.

    Parameters
    ----------
    kind : {"kernel", "soft"}

    Returns
    -------
    Library

    Raises
    ------
    OSError
        It can't be loaded; the text names the library and the package it is in.
    """
    path = kernel_path() if kind == "kernel" else soft_path()
    if (kind, path) not in _opened:
        try:
            library = Library(kind, path)
        except OSError as error:
            raise OSError(
                f"the {kind} device library can't be opened: {error}. "
                + (
                    "Install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or "
                    "libibverbs (Fedora, RHEL)"
                    if kind == "kernel"
                    else "Build or install rdmaview again"
                )
            ) from None
        # Two threads may both have come here: all use what came first.
        _opened.setdefault((kind, path), library)
    return _opened[kind, path]
