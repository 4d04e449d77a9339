"""Put env/ and jobs/ into the wheel as `miles_hpc/data/{env,jobs}`, where `miles_hpc.paths.packaged` looks for them.

All other metadata stands in pyproject.toml; an editable install reads both folders from the checkout.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = ("env", "jobs")


class BuildWithData(build_py):
    """Copies the two folders, which stand beside the package in a checkout, into it."""

    def run(self) -> None:
        """Build the modules, then add the data."""
        super().run()
        if self.editable_mode:
            return
        for folder in DATA:
            target = Path(self.build_lib) / "miles_hpc" / "data" / folder
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithData})
