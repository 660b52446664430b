"""The contract finds planted faults: each makes the promise fail that it breaks."""

from __future__ import annotations

import pytest

import uniclip
from kit.contract import PROMISES
from kit.faults import FAULTS, SPARSE, Fault
from kit.frameworks import Framework
from kit.promise import Promise, run_eagerly


def keep(fw: Framework, uc: object, promise: Promise) -> None:
    """Run all that a promise consists of."""
    for program in promise.programs_for(fw):
        run_eagerly(fw, uc, program)
    if promise.check:
        promise.check(fw, uc)


def require_found(fw: Framework, fault: Fault) -> None:
    """Require that what is promised is kept by uniclip, and not by what has the fault."""
    [promise] = [promise for promise in PROMISES if promise.case == fault.case]
    keep(fw, uniclip, promise)
    with pytest.raises(AssertionError):
        keep(fw, fault.broken(uniclip), promise)


@pytest.mark.only("numpy")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what the faults compute
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_found(framework: Framework, fault: Fault) -> None:
    """A fault that NumPy's arrays can show is found on NumPy."""
    require_found(framework, fault)


@pytest.mark.only("torch")
@pytest.mark.parametrize("fault", SPARSE, ids=lambda fault: fault.what)
def test_a_fault_of_sparse_arrays_is_found(framework: Framework, fault: Fault) -> None:
    """One of sparse arrays is found where there are some."""
    require_found(framework, fault)
