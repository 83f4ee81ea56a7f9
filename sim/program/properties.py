"""The device's properties in the layouts and numbers of the CUDA runtime (driver_types.h: cudaDeviceProp, cudaDeviceAttr)."""

from __future__ import annotations

import numpy as np

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.multiprocessor import Multiprocessor
from cupyflash.sim.program.memory import TOTAL

PROPERTIES = """
    name:S256 uuid:S16 luid:S8 luidDeviceNodeMask:u4 totalGlobalMem:u8 sharedMemPerBlock:u8 regsPerBlock warpSize memPitch:u8
    maxThreadsPerBlock maxThreadsDim:3 maxGridSize:3 {a}totalConstMem:u8 major minor textureAlignment:u8 texturePitchAlignment:u8
    {b}multiProcessorCount {c}integrated canMapHostMemory {d}maxTexture1D maxTexture1DMipmap {e}maxTexture2D:2 maxTexture2DMipmap:2
    maxTexture2DLinear:3 maxTexture2DGather:2 maxTexture3D:3 maxTexture3DAlt:3 maxTextureCubemap maxTexture1DLayered:2
    maxTexture2DLayered:3 maxTextureCubemapLayered:2 maxSurface1D maxSurface2D:2 maxSurface3D:3 maxSurface1DLayered:2
    maxSurface2DLayered:3 maxSurfaceCubemap maxSurfaceCubemapLayered:2 surfaceAlignment:u8 concurrentKernels ECCEnabled pciBusID
    pciDeviceID pciDomainID tccDriver asyncEngineCount unifiedAddressing {f}memoryBusWidth l2CacheSize persistingL2CacheMaxSize
    maxThreadsPerMultiProcessor streamPrioritiesSupported globalL1CacheSupported localL1CacheSupported
    sharedMemPerMultiprocessor:u8 regsPerMultiprocessor managedMemory isMultiGpuBoard multiGpuBoardGroupID
    hostNativeAtomicSupported {g}pageableMemoryAccess concurrentManagedAccess computePreemptionSupported
    canUseHostPointerForRegisteredMem cooperativeLaunch {h}sharedMemPerBlockOptin:u8 pageableMemoryAccessUsesHostPageTables
    directManagedMemAccessFromHost maxBlocksPerMultiProcessor accessPolicyMaxWindowSize reservedSharedMemPerBlock:u8
    hostRegisterSupported sparseCudaArraySupported hostRegisterReadOnlySupported timelineSemaphoreInteropSupported
    memoryPoolsSupported gpuDirectRDMASupported gpuDirectRDMAFlushWritesOptions gpuDirectRDMAWritesOrdering
    memoryPoolSupportedHandleTypes deferredMappingCudaArraySupported ipcEventSupported clusterLaunch unifiedFunctionPointers
    {i}
"""
"""Fields in order, with the fields that only CUDA 12 or only 13 has in braces; int is not written."""

ONLY = {
    13: {"i": "numaConfig numaId mpsEnabled hostNumaId gpuPciDeviceID:u4 gpuPciSubsystemID:u4 hostNumaMultinodeIpc reserved:56"},
    12: {
        "a": "clockRate ",
        "c": "kernelExecTimeoutEnabled ",
        "b": "deviceOverlap ",
        "d": "computeMode ",
        "e": "maxTexture1DLinear ",
        "f": "memoryClockRate ",
        "g": "singleToDoublePrecisionPerfRatio ",
        "h": "cooperativeMultiDeviceLaunch ",
        "i": "reserved2:2 reserved1:1 reserved:60",
    },
}

ATTRIBUTES = """
    1 maxThreadsPerBlock 2 maxThreadsDim.0 3 maxThreadsDim.1 4 maxThreadsDim.2 5 maxGridSize.0 6 maxGridSize.1 7 maxGridSize.2
    8 sharedMemPerBlock 9 totalConstMem 10 warpSize 11 memPitch 12 regsPerBlock 13 clockRate 14 textureAlignment 15 deviceOverlap
    16 multiProcessorCount 18 integrated 19 canMapHostMemory 31 concurrentKernels 32 ECCEnabled 36 memoryClockRate
    37 memoryBusWidth 38 l2CacheSize 39 maxThreadsPerMultiProcessor 40 asyncEngineCount 41 unifiedAddressing 75 major 76 minor
    78 streamPrioritiesSupported 79 globalL1CacheSupported 80 localL1CacheSupported 81 sharedMemPerMultiprocessor
    82 regsPerMultiprocessor 83 managedMemory 86 hostNativeAtomicSupported 89 concurrentManagedAccess
    90 computePreemptionSupported 91 canUseHostPointerForRegisteredMem 95 cooperativeLaunch 97 sharedMemPerBlockOptin
    99 hostRegisterSupported 101 directManagedMemAccessFromHost 106 maxBlocksPerMultiProcessor 111 reservedSharedMemPerBlock
    115 memoryPoolsSupported 120 clusterLaunch
    21 maxTexture1D 22 maxTexture2D.0 23 maxTexture2D.1 24 maxTexture3D.0 25 maxTexture3D.1 26 maxTexture3D.2
    27 maxTexture2DLayered.0 28 maxTexture2DLayered.1 29 maxTexture2DLayered.2 42 maxTexture1DLayered.0 43 maxTexture1DLayered.1
    45 maxTexture2DGather.0 46 maxTexture2DGather.1 47 maxTexture3DAlt.0 48 maxTexture3DAlt.1 49 maxTexture3DAlt.2
    52 maxTextureCubemap 53 maxTextureCubemapLayered.0 54 maxTextureCubemapLayered.1 55 maxSurface1D 56 maxSurface2D.0
    57 maxSurface2D.1 58 maxSurface3D.0 59 maxSurface3D.1 60 maxSurface3D.2 61 maxSurface1DLayered.0 62 maxSurface1DLayered.1
    63 maxSurface2DLayered.0 64 maxSurface2DLayered.1 65 maxSurface2DLayered.2 66 maxSurfaceCubemap 67 maxSurfaceCubemapLayered.0
    68 maxSurfaceCubemapLayered.1 69 maxTexture1DLinear 70 maxTexture2DLinear.0 71 maxTexture2DLinear.1 72 maxTexture2DLinear.2
"""
"""Attributes by number, each the property of that name, or an element of it; all others are 0."""


TEXTURES: dict[str, int | tuple[int, ...]] = {
    "maxTexture1D": 131072,
    "maxTexture1DLinear": 1 << 28,
    "maxTexture2D": (131072, 65536),
    "maxTexture2DLinear": (131072, 65000, 2097120),
    "maxTexture2DGather": (32768, 32768),
    "maxTexture3D": (16384, 16384, 16384),
    "maxTexture3DAlt": (8192, 8192, 32768),
    "maxTextureCubemap": 32768,
    "maxTexture1DLayered": (32768, 2048),
    "maxTexture2DLayered": (32768, 32768, 2048),
    "maxTextureCubemapLayered": (32768, 2046),
    "maxSurface1D": 32768,
    "maxSurface2D": (131072, 65536),
    "maxSurface3D": (16384, 16384, 16384),
    "maxSurface1DLayered": (32768, 2048),
    "maxSurface2DLayered": (32768, 32768, 2048),
    "maxSurfaceCubemap": 32768,
    "maxSurfaceCubemapLayered": (32768, 2046),
}
"""Largest textures and surfaces, in texels (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


def layout(version: int) -> np.dtype:
    """Returns cudaDeviceProp of CUDA 12 or 13."""
    parts = dict.fromkeys("abcdefghi", "") | ONLY[version]
    fields = []
    for field in PROPERTIES.format(**parts).split():
        name, _, kind = field.partition(":")
        fields.append((name, "i4", int(kind)) if kind.isdecimal() else (name, kind or "i4"))
    return np.dtype(fields, align=True)


def values(device: Device) -> Report:
    """Returns the properties that are not 0, by name."""
    chip = Multiprocessor.like(device.compute_capability)
    major, minor = device.compute_capability
    return {
        "name": f"{device.name} (simulated)".encode(),
        "totalGlobalMem": TOTAL,
        "sharedMemPerBlock": 48 << 10,
        "regsPerBlock": device.registers_per_sm,
        "warpSize": 32,
        "memPitch": (1 << 31) - 1,
        "maxThreadsPerBlock": 1024,
        "maxThreadsDim": (1024, 1024, 64),
        "maxGridSize": ((1 << 31) - 1, 65535, 65535),
        "totalConstMem": 64 << 10,
        "major": major,
        "minor": minor,
        "textureAlignment": 512,
        "texturePitchAlignment": 32,
        "surfaceAlignment": 512,
        "multiProcessorCount": device.sm_count,
        "canMapHostMemory": 1,
        "concurrentKernels": 1,
        "asyncEngineCount": 2,
        "deviceOverlap": 1,
        "unifiedAddressing": 1,
        "clockRate": 1_000_000,
        "memoryClockRate": 1_000_000,
        **TEXTURES,
        "memoryBusWidth": 256,
        "l2CacheSize": device.l2_bytes,
        "maxThreadsPerMultiProcessor": chip.threads,
        "streamPrioritiesSupported": 1,
        "globalL1CacheSupported": 1,
        "localL1CacheSupported": 1,
        "sharedMemPerMultiprocessor": device.sram_per_sm,
        "regsPerMultiprocessor": device.registers_per_sm,
        "managedMemory": 1,
        "concurrentManagedAccess": 1,
        "computePreemptionSupported": 1,
        "canUseHostPointerForRegisteredMem": 1,
        "cooperativeLaunch": 1,
        "sharedMemPerBlockOptin": device.sram_per_block,
        "maxBlocksPerMultiProcessor": chip.blocks,
        "reservedSharedMemPerBlock": 1024 if major >= 8 else 0,
        "hostRegisterSupported": 1,
        "memoryPoolsSupported": 1,
        "clusterLaunch": int(major >= 9),
    }


def properties(device: Device, version: int) -> bytes:
    """Returns cudaDeviceProp as bytes."""
    kind, known = layout(version), values(device)
    found = np.zeros((), kind)
    for name in kind.names or ():
        if name in known:
            found[name] = known[name]
    return found.tobytes()


def attribute(device: Device, number: int) -> int:
    """Returns an attribute by its number."""
    words = ATTRIBUTES.split()
    names = dict(zip(map(int, words[::2]), words[1::2], strict=True))
    name, _, at = names.get(number, "").partition(".")
    found = values(device).get(name, 0)
    return int(found[int(at)] if at else found)
