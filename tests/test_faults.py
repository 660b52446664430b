"""The contract detects planted faults: each one breaks its guarantee."""

from __future__ import annotations

import pytest

import uniclip
from kit.contract import PROMISES
from kit.faults import FAULTS, SPARSE, Fault
from kit.frameworks import Framework
from kit.promise import Promise, run_eagerly


def keep(fw: Framework, uc: object, promise: Promise) -> None:
    """Run all programs and checks of a guarantee."""
    for program in promise.programs_for(fw):
        run_eagerly(fw, uc, program)
    if promise.check:
        promise.check(fw, uc)


def require_found(fw: Framework, fault: Fault) -> None:
    """Require uniclip to keep the guarantee, and the faulty copy to break it."""
    [promise] = [promise for promise in PROMISES if promise.case == fault.case]
    keep(fw, uniclip, promise)
    with pytest.raises(AssertionError):
        keep(fw, fault.broken(uniclip), promise)


@pytest.mark.only("numpy")
# The faults compute NaN, and NumPy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_found(framework: Framework, fault: Fault) -> None:
    """NumPy detects each fault that its arrays can show."""
    require_found(framework, fault)


@pytest.mark.only("torch")
@pytest.mark.parametrize("fault", SPARSE, ids=lambda fault: fault.what)
def test_a_fault_of_sparse_arrays_is_found(framework: Framework, fault: Fault) -> None:
    """Frameworks with sparse arrays detect the faults that only those show."""
    require_found(framework, fault)
