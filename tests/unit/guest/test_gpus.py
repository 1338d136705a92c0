"""State that a kernel with a GPU cannot save: stand-ins for libraries and a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.checkpoints import blockers
from kernel_specs.restricted.hibernation.attempt_limits import GPU_ARRAY, kind_of, on_gpu


def made(module: str, **attributes: Any) -> Any:
    return type("Tensor", (), {"__module__": module, **attributes})()


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (made("torch", is_cuda=True), True),
        (made("torch", is_cuda=False), False),
        (made("torch.nn.parameter", is_cuda=True), True),
        (made("jaxlib._jax", devices=lambda _: [SimpleNamespace(platform="gpu")]), True),
        (made("jaxlib._jax", devices=lambda _: [SimpleNamespace(platform="cpu")]), False),
        (made("torchlike", is_cuda=True), False),
        (made("mine", is_cuda=True), False),
    ],
)
def test_arrays_in_the_memory_of_a_gpu_are_known(value: Any, held: bool) -> None:
    assert on_gpu(value) == held


@pytest.mark.parametrize(
    ("module", "name"),
    [("cupy._core.core", "ndarray"), ("numba.cuda.cudadrv.devicearray", "DeviceNDArray")],
)
def test_arrays_of_libraries_for_gpus_alone_are_known_by_their_class(
    module: str, name: str
) -> None:
    assert kind_of(type(name, (), {"__module__": module})) == GPU_ARRAY


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("7f00-7f10 rw-s 00000000 00:06 9 /dev/nvidia0", True),
        ("7f00-7f10 rw-s 00000000 00:06 9 /dev/nvidiactl", True),
        ("7f00-7f10 r-xp 00000000 00:06 9 /usr/lib/libcuda.so.1", False),
        ("7f00-7f10 rw-s 00000000 00:06 9 /dev/zero", False),
    ],
)
def test_a_mapped_device_of_a_gpu_is_in_the_way_of_a_checkpoint(line: str, used: bool) -> None:
    assert blockers._uses_gpu([line]) == used
