/*
 * view_type.h - how MemoryRegionView objects come and go.
 *
 * Cython can make all objects of a type known to the garbage collector, or none. Views
 * are made by the million, and nearly all are of memory that refers to nothing: these
 * stay unknown to it, 16 bytes smaller and cheaper. But the owner of the memory may be an
 * object that holds a view of itself, and only the collector can end such a cycle: views
 * of such a registration are made known to it. CPython has a slot for types with
 * both kinds of objects, tp_is_gc; the type `type` itself is one.
 *
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef RDMAVIEW_VIEW_TYPE_H
#define RDMAVIEW_VIEW_TYPE_H

#include <Python.h>
#include "rdmaview.h"

#ifdef Py_GIL_DISABLED
#error "the list of free views relies on the GIL"
#endif

/* The first fields of Registration, as _view.pxd has them. */
typedef struct {
	PyObject_HEAD
	int is_cyclic;
} RegistrationHead;

/* MemoryRegionView, as _view.pxd has it. */
typedef struct {
	PyObject_HEAD
	rdmaview_view value;
	PyObject *registration; /* or None; never NULL */
} ViewObject;

/* Freed views that the collector did not know, to be used again. */
#define FREE_VIEWS 256
static ViewObject *free_views[FREE_VIEWS];
static int free_view_count;

/* Never changes in the life of a view, and is asked while it has its registration. */
static inline int view_is_gc(PyObject *self)
{
	PyObject *registration = ((ViewObject *)self)->registration;

	return registration != Py_None &&
	       ((RegistrationHead *)registration)->is_cyclic;
}

static inline ViewObject *new_plain_view(PyTypeObject *type)
{
	if (free_view_count == 0)
		return PyObject_New(ViewObject, type);
	return (ViewObject *)PyObject_Init(
		(PyObject *)free_views[--free_view_count], type);
}

static inline PyObject *make_view(PyTypeObject *type,
				  const rdmaview_view *value,
				  PyObject *registration)
{
	int is_cyclic = registration != Py_None &&
			((RegistrationHead *)registration)->is_cyclic;
	ViewObject *view = is_cyclic ? PyObject_GC_New(ViewObject, type) :
				       new_plain_view(type);

	if (view == NULL)
		return NULL;
	view->value = *value;
	Py_INCREF(registration);
	view->registration = registration;
	if (is_cyclic)
		PyObject_GC_Track(view);
	return (PyObject *)view;
}

/* For __new__, which makes detached views only, and puts None in as the registration. */
static PyObject *view_alloc(PyTypeObject *type, Py_ssize_t n)
{
	ViewObject *view = new_plain_view(type);

	(void)n;
	if (view == NULL)
		return NULL;
	memset(&view->value, 0, sizeof(view->value));
	view->registration = NULL;
	return (PyObject *)view;
}

/* No tp_clear: a view never changes, so every cycle has another object to break it at. */
static int view_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(((ViewObject *)self)->registration);
	return 0;
}

static void view_dealloc(PyObject *self)
{
	PyObject *registration = ((ViewObject *)self)->registration;

	if (view_is_gc(self)) {
		PyObject_GC_UnTrack(self);
		PyObject_GC_Del(self);
	} else if (free_view_count < FREE_VIEWS) {
		free_views[free_view_count++] = (ViewObject *)self;
	} else {
		PyObject_Free(self);
	}
	/* Last, since it may deregister, and run any code. */
	Py_DECREF(registration);
}

/* sys.getsizeof of 3.11 and later adds a header by the type's flag, and asks no tp_is_gc. */
static inline Py_ssize_t uncounted_header(PyObject *self)
{
	int is_miscounted = PY_VERSION_HEX >= 0x030B0000 && !view_is_gc(self);

	return is_miscounted ? 2 * sizeof(void *) : 0;
}

/* To be called once, on the type as Cython made it. */
static int set_up_view_type(PyTypeObject *type, vectorcallfunc call)
{
	if (type->tp_basicsize != sizeof(ViewObject)) {
		PyErr_SetString(PyExc_SystemError,
				"view_type.h does not fit MemoryRegionView");
		return -1;
	}
	type->tp_alloc = view_alloc;
	type->tp_dealloc = view_dealloc;
	type->tp_traverse = view_traverse;
	type->tp_is_gc = view_is_gc;
	type->tp_flags |= Py_TPFLAGS_HAVE_GC;
	type->tp_vectorcall = call;
	PyType_Modified(type);
	return 0;
}

#endif /* RDMAVIEW_VIEW_TYPE_H */
