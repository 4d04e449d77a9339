"""What every Python of the job does first: makes its stacks available, has NCCL proved, then runs the site's own sitecustomize.

Python imports one module of this name, the first on sys.path, so the next one is run from here. Of NCCL it costs nothing
where the job preloads none. Knows no NCCL itself: that is `miles_hpc.probe.nccl_hook`, imported where a process uses it.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _BeforeTorch:
    """Finds torch where it is, and has the job's NCCL loaded before torch runs and proved after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's spec with a loader that takes care of NCCL; None for every other module."""
        if name != "torch":
            return None
        spec = None
        for finder in tuple(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                break
        loader = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                from miles_hpc.probe.nccl_hook import load_pinned, report

                load_pinned(module.__spec__)
                run(module)
                report()

            loader.exec_module = exec_module
        return spec


def _prove_nccl() -> None:
    pinned = os.environ.get("MILES_HPC_NCCL")
    if not pinned:
        return
    # Not importable: another Python, which is older; what it maps is seen from outside.
    with contextlib.suppress(ImportError):
        preloaded = os.environ.get("LD_PRELOAD", "")
        if pinned in preloaded or "libnccl" in preloaded:
            from miles_hpc.probe.nccl_hook import report

            report()
        sys.meta_path.insert(0, _BeforeTorch())


def _run_next() -> None:
    here = __file__.rpartition("/")[0]
    others = [entry for entry in sys.path if entry.rstrip("/") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _register_stacks() -> None:
    if "MILES_HPC_RUN_DIR" not in os.environ or not os.environ.get("TMPDIR"):
        return
    # Another Python, which may be older, has what it can import.
    with contextlib.suppress(ImportError, AttributeError):
        from miles_hpc.probe.stack_hook import register_stacks

        register_stacks()


try:
    _register_stacks()
    _prove_nccl()
finally:
    _run_next()
