"""Extensions of rdmaview, and the directives that they are all compiled with."""

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

MODULES = ["_errors", "_library", "_view", "_verbs", "_queue"]

SOFT_DEVICE = "rdmaview/softverbs"
SOFT_SOURCES = [
    "control",
    "device",
    "events",
    "memory",
    "names",
    "objects",
    "queue",
    "transfer",
]

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"rdmaview.{name}",
                [f"rdmaview/{name}.pyx"],
                include_dirs=["include", "rdmaview"],
                extra_compile_args=COMPILE_ARGS,
                depends=["include/rdmaview.h", "rdmaview/verbs_header.h"],
            )
            for name in MODULES
        ],
        compiler_directives=DIRECTIVES,
    )
    + [
        Extension(
            "rdmaview.softverbs._softverbs",
            [
                f"{SOFT_DEVICE}/{name}.c"
                for name in SOFT_SOURCES
            ],
            include_dirs=["rdmaview"],
            extra_compile_args=[*COMPILE_ARGS, "-Wall", "-Wextra"],
            extra_link_args=[
                f"-Wl,--version-script={SOFT_DEVICE}/softverbs.map",
                "-Wl,-Bsymbolic",
                "-Wl,-soname,libsoftverbs.so.1",
                "-pthread",
            ],
            depends=[f"{SOFT_DEVICE}/softverbs.h", f"{SOFT_DEVICE}/softverbs.map"],
        )
    ],
)
