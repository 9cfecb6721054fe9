"""Each mend by which real chat templates are read rightly is missed by a default test once it is reversed."""

import os
import subprocess
import sys

import pytest

from form_mutations import FORM_MUTATIONS
from patience import patience

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(len(FORM_MUTATIONS)), ids=[each[0].name for each in FORM_MUTATIONS])
def test_a_reversed_mend_makes_a_default_test_fail(number: int) -> None:
    tests = [sys.executable, "-m", "pytest", "-qx", "-p", "form_mutations", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*tests, "-m", "not slow and not nightly", FORM_MUTATIONS[number][1]],
        env={**os.environ, "FORM_MUTATION": str(number)},
        capture_output=True,
        text=True,
        timeout=patience(600),
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:] + done.stderr[-2000:]
