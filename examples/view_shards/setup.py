"""Builds the module against the rdmaview that is installed: its header and its .pxd."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import rdmaview

setup(
    ext_modules=cythonize(
        [
            Extension(
                "view_shards",
                ["view_shards.pyx"],
                depends=["shards.h"],
                include_dirs=[rdmaview.get_include(), "."],
            )
        ]
    ),
)
