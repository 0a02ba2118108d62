"""Builds the consumer against the rdmaview that is installed."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import rdmaview

setup(
    name="consumer",
    ext_modules=cythonize(
        [Extension("consumer", ["consumer.pyx"], include_dirs=[rdmaview.get_include()])]
    ),
)
