"""The runtime's functions of devices and of what a kernel takes: one device, with the properties of a chip."""

from __future__ import annotations

import struct

from cupyflash.multiprocessor import Multiprocessor
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.launches import HEAP
from cupyflash.sim.program.properties import attribute, properties
from cupyflash.sim.program.streams import tells
from cupyflash.sim.program.symbols import SymbolCalls

STACK, PRINTF = 0, 1
LIMITS = {STACK: 1024, PRINTF: 1 << 20, HEAP: 8 << 20}
"""cudaLimit, with the values that a device begins with."""

REGISTERS = 32
"""Registers of a thread that functions of occupancy assume: the program has no machine code."""

DYNAMIC_SHARED, CARVEOUT = 8, 9
"""cudaFuncAttribute."""


class DeviceCalls(SymbolCalls):
    """Devices, limits, attributes of kernels, occupancy."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self.limits = dict(LIMITS)
        self.most_dynamic: dict[int, int] = {}

    cudaGetDeviceCount = tells(1)
    cudaGetDevice = cudaChooseDevice = cudaDeviceCanAccessPeer = tells(0)
    cudaGetDeviceFlags = tells(8)

    def cudaSetDevice(self, device: int) -> None:
        if device & 0xFFFFFFFF:
            raise CudaError(ErrorCode.INVALID_DEVICE)

    cudaInitDevice = cudaSetDevice

    def without_effect(self) -> None:
        """Does nothing: for functions that only advise."""

    cudaSetDeviceFlags = cudaDeviceSetCacheConfig = cudaDeviceSetSharedMemConfig = without_effect
    cudaCtxResetPersistingL2Cache = cudaProfilerStart = cudaProfilerStop = without_effect

    def cudaGetDeviceProperties(self, out: int, device: int) -> None:
        self.cudaSetDevice(device)
        self.channel.write(out, properties(self.device, self.version))

    cudaGetDeviceProperties_v2 = cudaGetDeviceProperties

    def cudaDeviceGetAttribute(self, out: int, number: int, device: int) -> None:
        self.cudaSetDevice(device)
        self.channel.write_int(out, attribute(self.device, number & 0xFFFFFFFF))

    def cudaDriverGetVersion(self, out: int) -> None:
        self.channel.write_int(out, 1000 * self.version)

    cudaRuntimeGetVersion = cudaDriverGetVersion

    def cudaDeviceSynchronize(self) -> None:
        self.wait_for_all()

    cudaDeviceReset = cudaThreadExit = cudaDeviceSynchronize

    def cudaDeviceGetPCIBusId(self, out: int, length: int, device: int) -> None:
        self.channel.write(out, b"0000:00:00.0\0"[: length & 0xFFFFFFFF])

    def cudaDeviceGetStreamPriorityRange(self, least: int, greatest: int) -> None:
        for out, value in ((least, 0), (greatest, -5)):
            if out:
                self.channel.write_int(out, value)

    def cudaDeviceGetLimit(self, out: int, limit: int) -> None:
        self.channel.write_word(out, self.limits.get(limit & 0xFFFFFFFF, 0))

    def cudaDeviceSetLimit(self, limit: int, value: int) -> None:
        self.limits[limit & 0xFFFFFFFF] = value

    # -- memory pools, of which there is one, that keeps nothing --------------------------------------------------------

    cudaDeviceGetDefaultMemPool = cudaDeviceGetMemPool = cudaMemPoolCreate = tells(16, 8)
    cudaDeviceSetMemPool = cudaMemPoolDestroy = cudaMemPoolSetAttribute = cudaMemPoolTrimTo = without_effect

    def cudaMemPoolGetAttribute(self, pool: int, attribute: int, out: int) -> None:
        self.channel.write_word(out, self.memory.used if attribute & 0xFFFFFFFF >= 5 else 0)

    # -- kernels --------------------------------------------------------------------------------------------------------

    def static_shared(self, function: int) -> int:
        kernel = self.kernel(function)
        return kernel.image.module.code(kernel.name).shared.size

    def cudaFuncGetAttributes(self, out: int, function: int) -> None:
        shared = self.static_shared(function)
        major, minor = self.device.compute_capability
        dynamic = self.most_dynamic.get(function, (48 << 10) - shared)
        words = struct.pack("<3Q7i", shared, 0, 0, 1024, REGISTERS, 10 * major + minor, 10 * major + minor, 0, dynamic, -1)
        self.channel.write(out, words)

    def cudaFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.kernel(function)
        if attribute & 0xFFFFFFFF == DYNAMIC_SHARED:
            if self.static_shared(function) + (value & 0xFFFFFFFF) > self.device.sram_per_block:
                raise CudaError(ErrorCode.INVALID_VALUE)
            self.most_dynamic[function] = value & 0xFFFFFFFF

    def cudaFuncSetCacheConfig(self, function: int) -> None:
        self.kernel(function)

    cudaFuncSetSharedMemConfig = cudaFuncSetCacheConfig

    def cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, out: int, function: int, threads: int, dynamic: int) -> None:
        threads &= 0xFFFFFFFF
        chip = Multiprocessor.like(self.device.compute_capability)
        shared = self.static_shared(function) + dynamic
        warps = -(-threads // 32)
        by = [chip.blocks, chip.threads // (32 * warps), self.device.registers_per_sm // (32 * warps * REGISTERS)]
        by += [self.device.sram_per_sm // (shared + chip.shared_reserved)] if shared else []
        self.channel.write_int(out, min(by) if threads <= 1024 else 0)

    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = cudaOccupancyMaxActiveBlocksPerMultiprocessor

    def cudaOccupancyAvailableDynamicSMemPerBlock(self, out: int, function: int, blocks: int) -> None:
        room = self.device.sram_per_sm // max(blocks & 0xFFFFFFFF, 1)
        self.channel.write_word(out, max(0, min(room - 1024, self.device.sram_per_block) - self.static_shared(function)))
