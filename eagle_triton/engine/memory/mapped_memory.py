"""GPU memory that grows without moving: CUDA maps more memory into a reserved range of addresses.

Tensors keep their addresses, so captured graphs stay valid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from cuda.bindings import driver  # part of torch's CUDA builds for Linux
except ImportError:
    driver = None


_SPARE = 1 / 64  # part of the device's memory that is not mapped


def can_map(device: torch.device) -> bool:
    """Whether memory on a device can grow without moving."""
    if driver is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    error, supported = driver.cuDeviceGetAttribute(attribute, _index(device))
    return int(error) == 0 and bool(supported)


class MappedMemory:
    """Addresses for the device's whole memory, with memory for the first `size` bytes.

    It is freed with the last reference. Its tensors are references too.
    """

    def __init__(self, device: torch.device, size: int):
        """Raises torch.OutOfMemoryError if there is no memory for `size` bytes."""
        assert size > 0, "a tensor needs memory at its address"
        torch.cuda.synchronize(device)  # makes the context
        self._device, self.size = device, 0
        self._kind, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for described in (self._kind, self._access):
            described.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            described.location.id = _index(device)
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._step = int(_checked(driver.cuMemGetAllocationGranularity(self._kind, flags)))
        self.reserved = self._whole(torch.cuda.get_device_properties(device).total_memory)
        self._address = int(_checked(driver.cuMemAddressReserve(self.reserved, self._step, 0, 0)))
        self.grow(size)

    def grow(self, size: int) -> None:
        """Map memory for at least `size` bytes; new bytes are uninitialised.

        Raises torch.OutOfMemoryError, and changes nothing, if there is none.
        """
        missing = self._whole(size) - self.size
        if missing <= 0:
            return
        if self.size + missing > self.reserved:
            raise torch.OutOfMemoryError(f"{size} bytes are more than {self._device} has")
        if self._room() < missing:
            torch.cuda.empty_cache()
            if self._room() < missing:
                raise torch.OutOfMemoryError(f"{self._device} has no {missing} bytes to spare")
        memory = _checked(driver.cuMemCreate(missing, self._kind, 0))
        place = self._address + self.size
        try:
            _checked(driver.cuMemMap(place, missing, 0, memory, 0))
        finally:
            _checked(driver.cuMemRelease(memory))  # it stays allocated while it is mapped
        try:
            _checked(driver.cuMemSetAccess(place, missing, [self._access], 1))
        except BaseException:
            driver.cuMemUnmap(place, missing)
            raise
        self.size += missing

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All addresses [n]; only the first `size` bytes may be touched."""
        return torch.as_tensor(self, device=self._device).view(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.reserved,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def _room(self) -> int:
        """Free bytes of the device, less a reserve for forwards and graphs."""
        free, whole = torch.cuda.mem_get_info(self._device)
        return free - int(whole * _SPARE)

    def _whole(self, size: int) -> int:
        return -(-size // self._step) * self._step

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is None or driver is None:
            return
        torch.cuda.synchronize(self._device)
        if self.size:
            driver.cuMemUnmap(address, self.size)
        driver.cuMemAddressFree(address, self.reserved)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _checked(result: tuple[Any, ...]) -> Any:
    """A driver call's result without its error code. Raises torch.OutOfMemoryError or RuntimeError."""
    error, *values = result
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("CUDA has no memory left to map")
    if int(error):
        raise RuntimeError(f"the driver could not map memory: {error!r}")
    return values[0] if values else None
