"""Runs the tests of this folder on a program: run.py PROGRAM [TEST...]."""

import os
import sys
import unittest
import warnings

SKIPPED = 77

if __name__ == "__main__":
    os.environ["REPLAYSSM_PROGRAM"] = os.path.abspath(sys.argv[1])
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    try:
        import openai  # noqa: F401
        import schemathesis  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error} (tests/requirements.txt)")
        sys.exit(SKIPPED)
    warnings.simplefilter("ignore", ResourceWarning)
    names = sys.argv[2:] or ["test_api", "test_clients", "test_json", "test_schema", "test_page"]
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    result = unittest.TextTestRunner(verbosity=2, warnings="ignore").run(suite)
    sys.exit(not result.wasSuccessful())
