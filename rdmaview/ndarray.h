/* Where an ndarray's bytes lie, read from the array itself: no call of NumPy, and no import of it. */
#ifndef RDMAVIEW_NDARRAY_H
#define RDMAVIEW_NDARRAY_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

static bool ndarray_is_known;

/* NumPy's table of types, once somebody has imported it: before that there is no ndarray. */
static bool learn_ndarray(void)
{
	PyObject *modules = PyImport_GetModuleDict();

	if (!PyDict_GetItemString(modules, "numpy") || _import_array() < 0) {
		/* Perhaps NumPy is being imported just now: its arrays are read as any buffer. */
		PyErr_Clear();
		return false;
	}
	ndarray_is_known = true;
	return true;
}

static inline bool is_ndarray(PyObject *x)
{
	return (ndarray_is_known || learn_ndarray()) && PyArray_Check(x);
}

static inline bool holds_objects(PyArrayObject *array)
{
	return PyDataType_REFCHK(PyArray_DESCR(array));
}

/* False if the bytes do not lie in one piece, or are no bytes to move. */
static inline bool read_ndarray(PyObject *x, uint64_t *address, uint64_t *size,
				int *readonly)
{
	PyArrayObject *array = (PyArrayObject *)x;
	const npy_intp *shape = PyArray_DIMS(array);
	uint64_t bytes = (uint64_t)PyArray_ITEMSIZE(array);
	int i;

	if (!(PyArray_FLAGS(array) &
	      (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)) ||
	    holds_objects(array))
		return false;
	for (i = 0; i < PyArray_NDIM(array); i++)
		bytes *= (uint64_t)shape[i];
	*address = (uint64_t)(uintptr_t)PyArray_DATA(array);
	*size = bytes;
	*readonly = !(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE);
	return true;
}

/* Borrowed; NULL if the array owns its bytes. */
static inline PyObject *ndarray_base(PyObject *x)
{
	return PyArray_BASE((PyArrayObject *)x);
}

#endif /* RDMAVIEW_NDARRAY_H */
