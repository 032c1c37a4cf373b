"""Builds the shared library with CMake, unless REPLAYSSM_LIBRARY names a built one, and puts it
into the package with the libraries beside it that target machines may lack."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUNDLED = ("libhwy",)


def version():
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(replayssm VERSION ([0-9.]+)", text).group(1)


def built_library():
    given = os.environ.get("REPLAYSSM_LIBRARY")
    if given:
        return Path(given)
    has_cuda = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
    preset = "cuda" if has_cuda else "release"
    options = ["-DBUILD_TESTING=OFF", "-B", "build/python"]
    subprocess.run(["cmake", "--preset", preset, *options], cwd=ROOT, check=True)
    target = ["--target", "replayssm_shared"]
    subprocess.run(["cmake", "--build", "build/python", *target], cwd=ROOT, check=True)
    return ROOT / "build/python/libreplayssm.so"


def bundled(library):
    """Libraries of BUNDLED that `library` is linked to."""
    for line in subprocess.run(
        ["ldd", library], check=True, capture_output=True, text=True
    ).stdout.splitlines():
        match = re.match(r"\s*(\S+) => (\S+)", line)
        if match and match.group(1).startswith(BUNDLED):
            yield match.group(1), Path(match.group(2)).resolve()


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        library = built_library()
        target = Path(self.build_lib) / "replayssm" / "lib"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.copy(library.resolve(), target / "libreplayssm.so")
        for name, path in bundled(library):
            shutil.copy(path, target / name)


class AnyPython(bdist_wheel):
    """For any Python 3 of this platform: the library is reached through ctypes."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True


setup(
    version=version(),
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython},
    distclass=WithLibrary,
)
