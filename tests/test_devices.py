"""Arrays on devices that NumPy cannot read, of a library without a file of its own:
what comes from elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import uniclip as uc

pytestmark = pytest.mark.needs("strict")
HERE, THERE, CPU = "device1", "device2", "CPU_DEVICE"


def put(values: Any, device: str = HERE) -> Any:
    """Return an array on a device."""
    import array_api_strict as xp

    return xp.asarray(np.asarray(values, "float32"), device=xp.Device(device))


def found(arrays: Any) -> list[Any]:
    """Return the values of arrays, each on the device on which it should be."""
    import array_api_strict as xp

    return [
        np.asarray(array.to_device(xp.Device(CPU)), "float64").round(5).tolist() for array in arrays
    ]


CALLS = {
    "a limit": lambda device: uc.clip([put([3.0, 4.0])], uc.by_global_norm(put(1.0, device)))[0],
    "a bound": lambda device: uc.clip(
        [put([-3.0, 4.0])], uc.by_value(-2.0, put([0.6, 0.8], device))
    )[0],
    "a norm": lambda device: uc.clip_by_global_norm([put([3.0, 4.0])], 1.0, norm=put(5.0, device))[
        0
    ],
    "parameters": lambda device: uc.clip(
        [put([3.0, 4.0])], uc.agc(0.1), [put([0.0, 10.0], device)]
    )[0],
    "a loss": lambda device: uc.Clipper(uc.skip_spikes())([put([0.6, 0.8])], loss=put(1.0, device)),
    "other leaves": lambda device: uc.clip(
        [put([9.0, 12.0]), put(8.0, device)], uc.by_global_norm(17 / 15)
    )[0][:1],
}


@pytest.mark.parametrize("device", [HERE, THERE, CPU])
@pytest.mark.parametrize("what", CALLS)
def test_from_elsewhere(what: str, device: str) -> None:
    """Limits, bounds, norms, parameters, losses and other leaves may lie on another device."""
    [array] = CALLS[what](device)
    assert array.device == put(0.0).device
    assert found([array]) == [[-2.0, 0.8] if what == "a bound" else [0.6, 0.8]]


def test_each_leaf_stays() -> None:
    """Leaves of several devices stay there, also where they are written in place.

    Norms lie with the first.
    """
    grads = [put([3.0, 4.0]), put([12.0], THERE), put([84.0], CPU)]
    devices = [array.device for array in grads]
    clipped, report = uc.clip(grads, uc.by_global_norm(8.5))
    uc.clip_(grads, uc.by_global_norm(8.5))
    assert [array.device for array in clipped] == [array.device for array in grads] == devices
    assert found(clipped) == found(grads) == [[0.3, 0.4], [1.2], [8.4]]
    assert {
        value.device for value in [*report.scalars().values(), report.norms, report.limits]
    } == {devices[0]}


def test_memory_is_read_and_written_once() -> None:
    """Views of one memory are found where NumPy cannot read it, too."""
    whole = put([[3.0, 4.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"grads\[0\] and grads\[1\] may overlap"):
        uc.clip_([whole, whole[:1, ...]], uc.by_global_norm(1.0))
    uc.clip_([whole[:1, ...], whole[1:, ...]], uc.by_global_norm(1.0))
    assert found([whole]) == [[[0.6, 0.8], [0.0, 0.0]]]
