"""Extensions of rdmaview, and the directives that they are all compiled with."""

from glob import glob

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

DIRECTIVES = {
    "language_level": 3,
    "embedsignature": True,
    "embedsignature.format": "python",
    "binding": False,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "always_allow_keywords": True,
    "nonecheck": True,
}

# One line on a missing <infiniband/verbs.h>, not the hundred that follow from it.
COMPILE_ARGS = ["-std=gnu11", "-O3", "-Wfatal-errors"]

MODULES = [
    "_errors",
    "_library",
    "_memory",
    "_view",
    "_arrays",
    "_verbs",
    "_queue",
    "_segments",
    "_cache",
]

SOFT = "rdmaview/softverbs"

bindings = [
    Extension(
        f"rdmaview.{name}",
        [f"rdmaview/{name}.pyx"],
        include_dirs=["include", "rdmaview", np.get_include()],
        extra_compile_args=COMPILE_ARGS,
        depends=["include/rdmaview.h", *glob("rdmaview/*.h")],
    )
    for name in MODULES
]

soft_device = Extension(
    "rdmaview.softverbs._softverbs",
    sorted(glob(f"{SOFT}/*.c")),
    include_dirs=["rdmaview"],
    extra_compile_args=[*COMPILE_ARGS, "-Wall", "-Wextra"],
    extra_link_args=[
        f"-Wl,--version-script={SOFT}/softverbs.map",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libsoftverbs.so.1",
        "-pthread",
    ],
    depends=[*glob(f"{SOFT}/*.h"), f"{SOFT}/softverbs.map"],
)

setup(
    ext_modules=[
        *cythonize(bindings, compiler_directives=DIRECTIVES),
        soft_device,
    ]
)
